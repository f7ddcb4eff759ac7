"""Plan files: what is saved is loaded, what is not a plan is refused, and nothing is half-written."""

import copy
import errno
import json
import math
import os
import pickle
import random
import stat
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.planfile.plan import PlanRecord, Timeline, plan_schema
from planner.planning.options import PlanOptions
from planner.user_plan import Plan
from tests.plans import layered_plan

PLAN = layered_plan()
TEXT = PLAN.dumps()
DOCUMENT: dict[str, Any] = json.loads(TEXT)
SCHEMA_PATH = Path(__file__).parents[2] / "docs" / "plan.schema.json"


def _loaded_or_refused(text: str | bytes) -> Plan | None:
    try:
        return Plan.loads(text, source="plan.json")
    except planner.PlanFileError as error:
        message = str(error)
    assert message.startswith("plan.json: ")
    assert message.isprintable()
    return None


def _changed(path: str, value: object) -> str:
    """The plan's JSON with one field changed; `path` as in graphs.0.backward.3."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    place: Any = document
    for part in parents:
        place = place[part]
    place[last] = value
    return json.dumps(document)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(str(path)).dumps() == TEXT
    assert os.listdir(tmp_path) == ["plan.json"]


def test_the_file_is_laid_out_for_people() -> None:
    lines = TEXT.splitlines()
    assert sum('"aten.softmax.default"' in line for line in lines) == 6
    assert max(len(line) for line in lines if '"phase"' not in line) <= 140
    assert TEXT.endswith("}\n")


def test_overhead_is_over_the_schedule_that_recomputes_nothing() -> None:
    assert math.isclose(PLAN.overhead, 0.1)


def test_recomputed_lists_forward_operations_once() -> None:
    graph = PLAN.graphs[0]
    assert graph.forward_length == 50
    assert len(graph.recomputed) == 28
    assert graph.recomputed == sorted(set(graph.recomputed))


def test_an_operation_may_be_run_several_times() -> None:
    backward = DOCUMENT["graphs"][0]["backward"]
    plan = Plan.loads(_changed("graphs.0.backward", [*backward[:-1], 3, 3, backward[-1]]))
    assert 3 in plan.graphs[0].recomputed


def test_the_published_schema_is_current() -> None:
    assert json.loads(SCHEMA_PATH.read_text()) == plan_schema(), "run `make schema`"


def test_plans_meet_the_published_schema() -> None:
    jsonschema.validate(DOCUMENT, json.loads(SCHEMA_PATH.read_text()))


@pytest.mark.parametrize(
    ("path", "value", "key_words"),
    [
        ("schema_version", 1, ["schema_version", "1", "reads 2"]),
        ("schema_version", "2", ["schema_version"]),
        ("schema_version", True, ["schema_version"]),
        ("coverage", "half-a-graph", ["coverage", "one-graph"]),
        ("graphs", [], ["graphs"]),
        ("graphs.0.backward.17", 9000, ["graphs[0].backward[17]", "9000", "100"]),
        ("graphs.0.backward.17", -1, ["graphs[0].backward[17]"]),
        ("graphs.0.backward.17", "17", ["graphs[0].backward[17]", "integer"]),
        ("graphs.0.backward.17", 17.5, ["graphs[0].backward[17]"]),
        ("graphs.0.backward.0", 51, ["graphs[0].backward[0]", "out of order"]),
        ("graphs.0.backward", [], ["graphs[0].backward", "never run"]),
        ("graphs.0.kept.0", 60, ["graphs[0].kept[0]", "forward"]),
        ("graphs.0.ops.3.bytes", -4, ["graphs[0].ops[3].bytes", "-4"]),
        ("graphs.0.ops.3.bytes", 10**30, ["graphs[0].ops[3].bytes"]),
        ("graphs.0.ops.3.bytes", True, ["graphs[0].ops[3].bytes"]),
        ("graphs.0.ops.3.seconds", float("nan"), ["graphs[0].ops[3].seconds", "finite"]),
        ("graphs.0.ops.3.seconds", float("inf"), ["graphs[0].ops[3].seconds"]),
        ("graphs.0.ops.3.seconds", -0.5, ["graphs[0].ops[3].seconds"]),
        ("graphs.0.ops.3.phase", "sideways", ["graphs[0].ops[3].phase", "sideways"]),
        ("graphs.0.ops.70.phase", "forward", ["graphs[0].ops[70].phase", "after a backward one"]),
        ("graphs.0.ops.3.name", None, ["graphs[0].ops[3].name"]),
        ("graphs.0.ops.3", {}, ["graphs[0].ops[3].name", "required"]),
        ("predicted.peak_bytes", 5, ["predicted.peak_bytes", "resident_bytes + dynamic_peak_bytes"]),
        ("target.budget_bytes", 5, ["predicted.peak_bytes", "budget of 5"]),
        ("resident.parameter_bytes", 5, ["predicted.resident_bytes", "total"]),
        ("timeline.peak_index", 0, ["timeline.peak_index"]),
        ("timeline.peak_index", 10**6, ["timeline.peak_index"]),
        ("timeline.bytes", [], ["timeline.bytes"]),
        ("timeline.forward_length", 10**6, ["timeline.forward_length"]),
        ("model.state_digest", "abc", ["model.state_digest"]),
        ("model.training", 1, ["model.training"]),
        ("model.inputs.0.shape.0", "8", ["model.inputs[0].shape[0]"]),
        ("solver.gap", float("nan"), ["solver.gap"]),
        ("surprise", 1, ["surprise"]),
        ("sur\nprise\x1b", 1, ["sur\\nprise\\x1b"]),
        ("x" * 10**4, 1, ["xxx"]),
        ("notes", ["x" * 10**5], ["notes[0]"]),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object, key_words: list[str]) -> None:
    with pytest.raises(planner.PlanFileError) as caught:
        Plan.loads(_changed(path, value), source="plan.json")
    message = str(caught.value)
    assert message.startswith("plan.json: ")
    for word in key_words:
        assert word in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "field",
    ["schema_version", *sorted(name for name, field in Plan.model_fields.items() if field.is_required())],
)
def test_a_missing_field_is_named(field: str) -> None:
    document = {name: value for name, value in DOCUMENT.items() if name != field}
    with pytest.raises(planner.PlanFileError, match=f"plan: {field}"):
        Plan.loads(json.dumps(document))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_cut_short_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "plan.json"
    path.write_text(TEXT[: int(share * len(TEXT.rstrip()))])
    with pytest.raises(planner.PlanFileError, match=r"plan\.json: .*cut short"):
        Plan.load(path)


@pytest.mark.parametrize(
    "text", ["null", "[]", "3", '"plan"', "{}", "[" * 10**5, "\x00", '{"schema_version": 2}']
)
def test_other_json_is_refused(text: str) -> None:
    assert _loaded_or_refused(text) is None


class _Writes:
    """Unpickling this, or evaluating its text, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_reading_a_file_runs_no_code(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert _loaded_or_refused(pickle.dumps(_Writes(made), protocol)) is None
    code = f"__import__('os').mkdir({str(made)!r})"
    assert _loaded_or_refused(code) is None
    for path in ("graphs.0.ops.3.name", "graphs.0.structure", "model.class_name", "coverage"):
        _loaded_or_refused(_changed(path, code))
    assert not made.exists()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path, Path("nul\0l")):
        with pytest.raises(planner.PlanFileError, match="cannot be read"):
            Plan.load(path)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    monkeypatch.setattr("planner.planfile.plan.LARGEST_FILE_BYTES", 1000)
    with pytest.raises(planner.PlanFileError, match="larger than 1000 bytes"):
        Plan.load(path)


_KEYS_AND_INDICES = st.lists(st.integers(0, 10**6), min_size=1, max_size=6)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(_KEYS_AND_INDICES, _ANYTHING, st.booleans())
def test_any_change_of_structure_is_a_plan_or_refused(way: list[int], value: object, remove: bool) -> None:
    document = copy.deepcopy(DOCUMENT)
    parent: Any = document
    for depth, pick in enumerate(way, 1):
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = keys[pick % len(keys)]
        child = parent[key]
        if depth == len(way) or not isinstance(child, dict | list) or not child:
            break
        parent = child
    if remove:
        del parent[key]
    else:
        parent[key] = value
    plan = _loaded_or_refused(json.dumps(document))
    # What is taken is a whole plan: it can be written and read again.
    assert plan is None or Plan.loads(plan.dumps()) == plan


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(TEXT.encode()) - 1), st.binary(min_size=0, max_size=4), st.integers(0, 40))
def test_any_change_of_bytes_is_a_plan_or_refused(position: int, inserted: bytes, removed: int) -> None:
    content = TEXT.encode()
    plan = _loaded_or_refused(content[:position] + inserted + content[position + removed :])
    assert plan is None or Plan.loads(plan.dumps()) == plan


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["os.replace", "os.fsync"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failing_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, existing: bool
) -> None:
    path = tmp_path / "plan.json"
    if existing:
        path.write_text("old")
    monkeypatch.setattr(step, _no_space)
    with pytest.raises(planner.PlanFileError, match=r"plan\.json: cannot be written: No space left"):
        PLAN.save(path)
    monkeypatch.setattr(step, _interrupted)
    with pytest.raises(KeyboardInterrupt):
        PLAN.save(path)
    assert os.listdir(tmp_path) == (["plan.json"] if existing else [])
    assert not existing or path.read_text() == "old"


def test_a_read_only_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    # Permission bits would not stop a test that runs as root.
    monkeypatch.setattr("os.open", read_only)
    with pytest.raises(planner.PlanFileError, match=r"plan\.json: cannot be written: Read-only"):
        PLAN.save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_places_that_no_file_can_take(tmp_path: Path) -> None:
    with pytest.raises(planner.PlanFileError, match="no directory"):
        PLAN.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(planner.PlanFileError, match="is not a file"):
        PLAN.save(tmp_path)
    with pytest.raises(planner.PlanFileError, match="is not a file"):
        PLAN.save(os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    PLAN.save(link)
    assert link.is_symlink()
    assert Plan.load(target) == PLAN


def test_saved_files_have_the_permissions_of_other_new_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    PLAN.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_name_may_be_as_long_as_file_systems_allow(tmp_path: Path) -> None:
    PLAN.save(path := tmp_path / ("\N{MUSICAL SYMBOL G CLEF}" * 63))  # 252 bytes of 255
    assert Plan.load(path) == PLAN


@settings(deadline=None)
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 2**32))
def test_a_thinned_timeline_keeps_its_peak(length: int, forward_share: float, seed: int) -> None:
    generator = random.Random(seed)
    live = np.array([generator.randrange(10**9) for _ in range(length)])
    forward_length = int(length * forward_share)
    timeline = Timeline.downsample(live, forward_length)
    assert len(timeline.bytes) <= 600
    assert timeline.bytes[timeline.peak_index] == live.max()
    assert max(timeline.bytes[: timeline.forward_length], default=0) == max(live[:forward_length], default=0)
    if length <= 598:
        assert timeline.bytes == live.tolist()


def test_plans_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PLAN.coverage = "several-graphs"  # type: ignore[misc]


def test_a_plan_is_its_record_with_methods_and_is_pickled_by_its_public_name() -> None:
    plan = layered_plan(layers=2, kept_layers=1)
    record = PlanRecord.loads(plan.dumps()).remember("options")
    assert Plan.of(record) == plan.remember("options")
    assert Plan.of(record).made_with == "options"
    again = pickle.loads(pickle.dumps(plan.remember(PlanOptions(outputs="held"))))
    assert (again, again.made_with) == (plan, None)  # as one that was read from a file
    assert (Plan.__module__, Plan.__qualname__) == ("planner", "Plan")
    assert plan_schema()["title"] == "Plan"


def test_numbers_and_characters_that_no_file_of_ours_has() -> None:
    options = {"x": 10**200}
    assert Plan.loads(Plan.loads(_changed("target.backend_options", options)).dumps())
    with pytest.raises(planner.PlanFileError, match="not valid JSON"):
        Plan.loads("\ud800")
    for code in ("utf-16", "utf-32"):
        with pytest.raises(planner.PlanFileError, match="it is UTF-16 or UTF-32, expected UTF-8"):
            Plan.loads(TEXT.encode(code))


def test_code_in_a_file_whose_name_is_in_no_encoding() -> None:
    code = """
class Net(nn.Module):
    def forward(self, x):
        return x.tanh().sin().sum()
"""
    names: dict[str, Any] = {"nn": nn, "__name__": "net"}
    exec(compile(code, "/n\udce9t.py", "exec"), names)
    x = torch.ones(8, requires_grad=True)
    plan = planner.plan(names["Net"](), (x,), budget="min", backend="replay", costs="roofline")
    assert plan.step is not None
    assert plan.step.lines[0] == r"n\udce9t.py:4"
    assert Plan.loads(plan.dumps()) == plan
