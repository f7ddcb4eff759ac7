"""Files from others, hostile: each is refused in words, or does nothing but what a right one does."""

import json
import os
import re
import stat
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanFileError, PlanMismatch, PlannerError
from planner.lazy import rank_zero
from planner.planfile import atomic_file
from planner.planfile.atomic_file import write_atomically
from planner.planfile.fingerprint import class_name, state_digest
from planner.planning.options import PlanOptions
from planner.user_plan import Plan

X = torch.ones(64, 8)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*layers).train()


@cache
def _text() -> str:
    return planner.plan(_model(), (X,), budget="min", costs="roofline").dumps()


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_text())
    return document


def _changed(path: str, value: object) -> dict[str, Any]:
    document = _document()
    *parents, last = path.split(".")
    place: Any = document
    for part in parents:
        place = place[int(part) if part.isdecimal() else part]
    place[last] = value
    return document


def _loaded(document: dict[str, Any]) -> Plan:
    return Plan.loads(json.dumps(document), source="plan.json")


def _all_shown(plan: Plan) -> None:
    plan.summary()
    plan.report()
    plan._repr_html_()
    json.dumps(plan.explain().to_dict(), allow_nan=False)


def _repeated_ops() -> dict[str, Any]:
    document = _document()
    graph = document["graphs"][0]
    graph["backward"] = [0] * 200_000 + graph["backward"]
    return document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (lambda: _changed("graphs.0.executions", [0] * 1_000_000), r"graphs\[0\]\.executions: a step of"),
        (_repeated_ops, r"graphs\[0\]\.backward: 2000\d\d operations run again"),
        (lambda: _changed("model.regions", ["0"] * 50_000), r"model\.regions: a submodule is there twice"),
        (lambda: _changed("no_recompute.seconds", 5e-324), r"predicted\.seconds: .* is too much"),
        (lambda: _changed("step.reads", [True] * 1_000_000), r"step\.reads\[0\]: .*integer"),
        (lambda: _changed("step.outside", [{}] * 300_000), r"step\.outside\[0\]\.name: .*required"),
        (lambda: _changed("graphs.0.ops", [{}] * 300_000), r"graphs\[0\]\.ops\[0\]\.name: .*required"),
        (lambda: _changed("model.inputs", [[]] * 90_000), r"model\.inputs\[0\]"),
        (lambda: _changed("target.budget_bytes", 2**64), r"target\.budget_bytes"),
        (lambda: _changed("target.in_flight", 2**62), r"target\.in_flight"),
        (lambda: _changed("target.parallel", {"kind": "fsdp2", "world_size": 2**62}), r"world_size"),
        (lambda: _changed("target.backend", "os.system"), r"target\.backend"),
        (lambda: _changed("target.backend_options", {"a": {"b": 1}}), r"target\.backend_options"),
        (lambda: _changed("created_with", {str(i): "x" for i in range(101)}), r"created_with"),
    ],
)
def test_a_small_file_that_asks_for_much_is_refused_at_once(
    document: Callable[[], dict[str, Any]], said: str
) -> None:
    text = json.dumps(document())
    with pytest.raises(PlanFileError, match=said) as found:
        Plan.loads(text, source="plan.json")
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 400
    more = re.search(r"and (\d+) more", str(found.value))
    assert more is None or int(more[1]) < 10  # it was refused at the first wrong entry


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["step"].update(value_bytes=[2**62] * len(d["step"]["value_bytes"])),
        lambda d: d["step"].update(workspace_bytes=[2**62] * len(d["step"]["workspace_bytes"])),
        lambda d: d["step"].update(left_bytes=2**62) or d["target"].update(in_flight=10**6),
        lambda d: d["step"].update(line_of=[0] * len(d["step"]["line_of"]), lines=["/etc/passwd:1"]),
        lambda d: d["timeline"].update(bytes=[2**63 - 1] * 3, peak_index=0, forward_length=1),
        lambda d: d["baseline_timeline"].update(bytes=[0], peak_index=0, forward_length=1),
        lambda d: [op.update(module=".".join("a" * 1000)) for op in d["graphs"][0]["ops"]],
        lambda d: [op.update(module="1" * 2000, name="." * 2000) for op in d["graphs"][0]["ops"]],
        lambda d: [op.update(module="../" * 600) for op in d["graphs"][0]["ops"]],
        lambda d: d["created_with"].update({"planner": "../../x", "os.system": "x"}),
    ],
)
def test_a_plan_that_loads_is_shown_or_refused_in_words(change: Callable[[dict[str, Any]], object]) -> None:
    document = _document()
    change(document)
    said = ""
    try:
        plan = _loaded(document)
        _all_shown(plan)
        said = str(plan.explain())
    except planner.PlannerError as error:
        said = str(error)
    assert said.replace("\n", "").isprintable()
    assert "root:" not in said  # lines of files are names, which nothing opens


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(forward_only=["x" * 256] * 1000),
        lambda d: d["target"].update(in_flight=10**6, device="/etc/passwd.json", costs="/etc/passwd"),
        lambda d: d["model"].update(autocast=["cuda:os.system"], torch_version="os.system"),
        lambda d: d["graphs"][0].update(occurrences=10**6),
        lambda d: d["graphs"][0].update(emitted=["os.system", "x"]),
    ],
)
def test_what_a_plan_names_is_never_run_opened_or_imported(
    change: Callable[[dict[str, Any]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _document()
    ran: list[str] = []
    change(document)
    monkeypatch.setattr("os.system", ran.append)
    planned, eager = _model(), _model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        _loaded(document).apply(planned)
        planned(X).sum().backward()
    eager(X).sum().backward()
    for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert ran == []


@pytest.mark.parametrize(
    "region", ["__class__", "0.0.weight", "0.__dict__", "nope", ".....", "0." * 900, "", "\x1b[2J"]
)
def test_a_region_that_the_model_has_not_is_refused_before_anything_changes(region: str) -> None:
    model = _model()
    with pytest.raises(PlanMismatch, match=r"the plan has regions that the .*Sequential has not") as found:
        _loaded(_changed("model.regions", [region])).apply(model)
    assert str(found.value).isprintable()
    assert planner.remove(model) is model


def test_of_a_field_that_is_there_twice_the_last_is_meant_everywhere() -> None:
    text = _text().replace('"class_name"', '"class_name": "first", "class_name"', 1)
    assert Plan.loads(text).model.class_name == _document()["model"]["class_name"]


@pytest.mark.parametrize("digits", ["1" + "0" * 5000, "1e400", "-1e400", "1" * 400])
def test_numbers_that_are_too_long_are_refused(digits: str) -> None:
    text = json.dumps(_changed("predicted.seconds", 123.25)).replace("123.25", digits)
    with pytest.raises(PlanFileError):
        Plan.loads(text)


# ---- what auto_checkpoint keeps, and ranks send -------------------------------------------------


def _cached(path: Path) -> str:
    model = planner.auto_checkpoint(_model(), budget="min", cache=path, costs="roofline")
    model(X).sum().backward()
    return path.read_text()


@pytest.mark.heavy
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["target"].update(budget_text="evil\x1b[2J", budget_bytes=None),
        lambda d: d["target"].update(
            parallel={
                "kind": "fsdp2",
                "world_size": 7,
                "tensor_ranks": 3,
                "param_dtype": "load",
                "replicas": 5,
            }
        ),
        lambda d: d["target"].update(backend="inductor", backend_options={"cpp.cxx": "/tmp/x"}),
        lambda d: d["model"]["inputs"][0].update(path="args[0].__class__", shape=[2**62] * 64),
        lambda d: d.clear(),
    ],
)
def test_a_cache_that_somebody_changed_is_planned_again(
    change: Callable[[dict[str, Any]], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_file = tmp_path / "plan.json"
    document = json.loads(_cached(tmp_path / "made.json"))
    change(document)
    cache_file.write_text(json.dumps(document))
    planned, eager = _model(), _model()
    planner.auto_checkpoint(planned, budget="min", cache=cache_file, costs="roofline")
    planned(X).sum().backward()
    eager(X).sum().backward()
    for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    written = capsys.readouterr().err
    assert "which was for another step" in written or "which could not be read" in written
    assert written.replace("\n", "").isprintable()


def test_a_plan_of_rank_zero_is_no_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zlib.compress(b" " * 3000)
    kind = f"{class_name(_model())} {state_digest(_model())}".encode()
    answers = {"model": kind, "answer": b'{"how": "", "parts": 1}', "part 0": packed}
    store = SimpleNamespace(wait=lambda *_: None, get=lambda key: answers[key.rpartition("/")[2]])
    monkeypatch.setattr(rank_zero, "is_alone", lambda: False)
    monkeypatch.setattr("planner._torch.distributed.default_store", lambda: store)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(rank_zero, "LARGEST_FILE_BYTES", 2000)
    with pytest.raises(PlanFileError, match="the plan of rank 0: larger than 2000 bytes"):
        rank_zero.planned_by_rank_zero(_model(), lambda: pytest.fail("it plans"), PlanOptions())


@pytest.mark.parametrize("error", [RuntimeError, torch.distributed.DistError])
def test_a_rank_that_waits_in_vain_says_for_what(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of what it does itself is its own."""

    def in_vain(*_: Any) -> Any:
        raise error("Wait timeout")

    store = SimpleNamespace(wait=in_vain, get=lambda _: b"another model")
    monkeypatch.setattr(rank_zero, "is_alone", lambda: False)
    monkeypatch.setattr("planner._torch.distributed.default_store", lambda: store)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    with pytest.raises(PlannerError, match=r"waited for the plan of rank 0.*\(Wait timeout\)"):
        rank_zero.planned_by_rank_zero(_model(), lambda: pytest.fail("it plans"), PlanOptions())
    store.wait = lambda *_: None
    with pytest.raises(error, match=r"^Wait timeout$"):
        rank_zero.planned_by_rank_zero(_model(), in_vain, PlanOptions())


# ---- where files are written --------------------------------------------------------------------


def test_a_link_of_another_user_in_an_open_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = tmp_path / "open", tmp_path / "target"
    folder.mkdir()
    folder.chmod(0o1777)
    target.write_text("mine")
    link = folder / "report.html"
    link.symlink_to(target)
    write_atomically(link, "new")  # a link of one's own is followed
    assert target.read_text() == "new"
    lstat = os.lstat
    theirs = SimpleNamespace(st_uid=os.geteuid() + 1, st_mode=lstat(link).st_mode)
    monkeypatch.setattr("os.lstat", lambda path: theirs if Path(path) == link else lstat(path))
    with pytest.raises(PlanFileError, match="is a link that another user made"):
        write_atomically(link, "evil")
    with pytest.raises(PlanFileError, match="is a link that another user made"):
        _loaded(_document()).save(link)
    assert target.read_text() == "new"
    folder.chmod(0o755)  # where only the owner makes files, links are followed whoever owns them
    write_atomically(link, "newer")
    assert target.read_text() == "newer"


def test_files_do_not_follow_a_link_that_is_put_in_their_way_meanwhile(tmp_path: Path) -> None:
    """What is written goes to a new file of an unforeseeable name, which replaces what is there by then."""
    target = tmp_path / "target"
    target.write_text("mine")
    path = tmp_path / "report.html"

    def write(file: Any) -> None:
        path.symlink_to(target)
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        file.write(b"new")

    atomic_file.replace_atomically(path, write)
    assert target.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_text() == "new"
