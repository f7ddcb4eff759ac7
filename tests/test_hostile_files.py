"""Files from others, hostile: each is refused in words, or does nothing but what a right one does."""

import json
import logging
import os
import pickle
import re
import stat
import struct
import tracemalloc
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
from typer.testing import CliRunner

import planner
from planner.allocator.recorded import SnapshotError, read_snapshot, recorded_run, replay
from planner.allocator.settings import AllocatorSettings
from planner.cli.commands import app
from planner.costs import measurement_cache
from planner.costs.devices import DeviceError, calibrated_path, load_device
from planner.costs.measurement_cache import CACHE_FORMAT, default_cache_path, read_entries
from planner.errors import PlanFileError, PlanMismatch
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
        lambda d: d.update(untraced=["os.system", "__import__('os').abort()"]),
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
        lambda d: d["target"].update(budget_text="9" * 300, budget_bytes=None),
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
        lambda d: d["model"].update(regions=["__class__"]),
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


# ---- devices ------------------------------------------------------------------------------------

_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bandwidth": _NAN}, "bandwidth is nan"),
        ({"bandwidth": _INF}, "bandwidth is inf"),
        ({"bandwidth": 10**400}, "bandwidth is 1000"),
        ({"memory_bytes": _INF}, "memory_bytes is inf"),
        ({"memory_bytes": 2**62}, "memory_bytes is 4611"),
        ({"memory_bytes": 10**400}, "memory_bytes is 1000"),
        ({"memory_bytes": 0.5}, "memory_bytes is 0.5"),
        ({"memory_bytes": True}, "memory_bytes is True"),
        ({"flops": {"float32": 10**400}}, "flops is"),
        ({"flops": {"float32": _NAN}}, "flops is"),
        ({"flops": [1]}, "flops is"),
        ({"launch_seconds": 1e300}, "launch_seconds is"),
        ({"launch_seconds": -_NAN}, "launch_seconds is nan"),
        ({"allocation_rounding_bytes": 0.5}, "allocation_rounding_bytes is 0.5"),
        ({"allocation_rounding_bytes": 2**62}, "allocation_rounding_bytes is"),
        ({"capability": 5}, "capability is 5"),
        ({"capability": [10**30, 0]}, "capability is"),
        ({"capability": "80"}, "capability is '80'"),
        ({"name": 5}, "name is 5"),
        ({"name": "x" * 10**5}, "name is 'xxx"),
        ({"name": ""}, "name is ''"),
        ({"cudnn": "no"}, "cudnn is 'no'"),
        ({"figures": {"a": 1}}, "figures is"),
        ({"kind": ["cpu"]}, "kind is"),
        ({"like": "device.json"}, "'like' is 'device.json'"),
        ({"like": "/etc/other.json"}, "'like' is '/etc/other.json'"),
        ({"like": ["A100-80GB"]}, "'like' is"),
        ({"like": "x" * 10**5}, "unknown device"),
        ({"__class__": 1}, "unknown field '__class__'"),
        ({"\x1b[2J": 1}, r"unknown field '\x1b[2J'"),
    ],
)
def test_a_device_that_cannot_be_is_refused_by_field(
    fields: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("device.json").write_text(json.dumps({"name": "mine", "like": "A100-80GB", **fields}))
    with pytest.raises(DeviceError) as found:
        load_device("device.json")
    assert said in str(found.value)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 700


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "[]", "", "\x00", " " * 2**21, '{"a":1' + "0" * 5000 + "}"]
)
def test_a_file_that_is_no_device_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(text)
    with pytest.raises(DeviceError, match=r"cannot be read|is a JSON object"):
        load_device(tmp_path / "device.json")


def test_the_file_of_a_measured_gpu_stays_in_its_folder() -> None:
    folder = calibrated_path("x").parent
    for product in ("../../etc/passwd", "/etc/passwd", "..\\..", "a\0b\n", "$(id)", ""):
        assert calibrated_path(product).parent == folder
        assert "\0" not in str(calibrated_path(product))


# ---- measurements -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries",
    [
        "[1e999]",
        "[NaN]",
        f"[{2**62}]",
        f"[{2**200}]",
        "[-1]",
        "[true]",
        "[]",
        '["1"]',
        "{}",
        '"12"',
        "[1" + "0" * 5000 + "]",
    ],
)
def test_measurements_that_are_none_are_measured_again(
    entries: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workspace.json"
    path.write_text(f'{{"format": {CACHE_FORMAT}, "environments": {{"e": {{"\\u001b[2J": {entries}}}}}}}')
    with caplog.at_level(logging.WARNING):
        assert read_entries(path, "e") == {}
    assert "are measured again" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "[]", "null", '{"format": 6, "environments": []}']
)
def test_a_file_that_holds_no_measurements_is_measured_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "workspace.json").write_text(text)
    assert read_entries(tmp_path / "workspace.json", "e") == {}


def test_measurements_of_gigabytes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "workspace.json"
    path.write_text(f'{{"format": {CACHE_FORMAT}, "environments": {{"e": {{"a": [1]}}}}}}')
    monkeypatch.setattr(measurement_cache, "_LARGEST_FILE", 10)
    assert read_entries(path, "e") == {}


@pytest.mark.heavy
@pytest.mark.parametrize("numbers", [[0], [7] * 30, [2**50] * 3, [2**62] * 3])
def test_a_plan_is_made_whatever_was_remembered(numbers: list[int]) -> None:
    planner.plan(_model(), (X,), budget="min", costs="measured")
    for path in (default_cache_path(), default_cache_path().with_name("seconds.json")):
        before = path.read_text()
        document = json.loads(before)
        for entries in document["environments"].values():
            entries.update(dict.fromkeys(entries, numbers))
        path.write_text(json.dumps(document))
        try:
            planner.plan(_model(), (X,), budget="min", costs="measured")
        finally:
            path.write_text(before)


# ---- recorded snapshots -------------------------------------------------------------------------


_NO_SIZES: tuple[object, ...] = (2**62, 2**400, -5, _INF, _NAN, "9" * 5000, [], None, {})


def _event(**fields: object) -> dict[str, object]:
    return {"action": "alloc", "addr": 1, "size": 512, "stream": 0, **fields}


def _segment(**fields: object) -> dict[str, object]:
    return {"address": 1, "total_size": 512, "blocks": [{"state": "inactive", "size": 512}], **fields}


@pytest.mark.parametrize(
    "snapshot",
    [
        *({"events": [_event(size=size)]} for size in _NO_SIZES),
        {"events": [_event(addr=2**70)]},
        {"events": [_event(stream=_INF)]},
        {"events": [_event(), 5]},
        {"events": "abc"},
        {"events": [_event()], "segments": [{"address": 1}]},
        {"events": [_event()], "segments": [_segment(address=_INF)]},
        {"events": [_event()], "segments": [_segment(total_size=-1)]},
        {"events": [_event()], "segments": [_segment(blocks=[{"state": "inactive", "size": 2**62}])]},
        {"events": [_event()], "segments": 5},
    ],
)
def test_a_history_that_cannot_be_is_refused(snapshot: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    whole = {"segments": snapshot.get("segments", []), "device_traces": [snapshot["events"]]}
    path.write_bytes(pickle.dumps(whole))
    with pytest.raises(SnapshotError, match="is not as PyTorch writes it") as found:
        recorded_run(read_snapshot(path))
    assert str(found.value).isprintable()
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the snapshot is not as PyTorch writes it")


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_history_that_contradicts_itself_is_replayed(settings: str) -> None:
    freed = _event(action="free_completed")
    events = [
        freed,
        _event(),
        _event(),
        freed,
        freed,
        _event(action="free_completed", addr=77),
        _event(size=2**50),
    ]
    run = recorded_run({"segments": [], "device_traces": [events]})
    assert replay(run, AllocatorSettings.parse(settings)).failed_at == len(events) - 1
    for device in (-1, 1, 2**62):
        with pytest.raises(SnapshotError, match="no history of device"):
            recorded_run({"segments": [], "device_traces": [events]}, device)


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch %s'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x08touch %s\x85R.",
        b"(S'touch %s'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch %s'\no.",
        b"\x80\x02\x82\x01.",  # a registered extension
        b"Pabc\n.",  # a persistent id
        b"\x80\x02X\x01\x00\x00\x00a)\x81.",
        b"\x80\x02}}X\x01\x00\x00\x00aX\x01\x00\x00\x00bsb.",
        b"\x80\x05\x97.",  # a buffer from outside
        b"\x80\x04\x8f.",  # a set
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 2**28) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
        b"\x80\xff.",
        b"\x80\x02Nr\xff\xff\xff\x00.",  # by which the unpickler in C makes a table of 256 MiB
        b"(" * 10**5,
        b"I" + b"9" * 10**5 + b"\n.",
        b"",
    ],
)
def test_a_pickle_runs_nothing_and_takes_no_more_than_its_size(content: bytes, tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "snapshot.pickle"
    path.write_bytes(content.replace(b"%s", str(made).encode()))
    tracemalloc.start()
    with pytest.raises(SnapshotError, match=r"is no snapshot of torch\.cuda\.memory") as found:
        read_snapshot(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20
    assert not made.exists()
    assert len(str(found.value)) < 600


def test_lists_that_hold_themselves_are_refused_or_replayed(tmp_path: Path) -> None:
    path, inside = tmp_path / "snapshot.pickle", [_event()]
    laughs: list[Any] = inside
    for _ in range(60):
        laughs = [laughs] * 10
    inside.append(inside)  # type: ignore[arg-type]
    for traces in (inside, [inside], laughs):
        path.write_bytes(pickle.dumps({"segments": traces, "device_traces": traces}))
        with pytest.raises(SnapshotError):
            recorded_run(read_snapshot(path))


@pytest.mark.parametrize("protocol", range(6))
def test_snapshots_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    shared = [{"filename": "a" * 300, "line": 2**40, "name": "é", "x": (1.5, None, True, False, ())}]
    events = [_event(addr=i + 1, frames=shared, size=300 + i) for i in range(600)]
    whole = {"segments": [_segment()], "device_traces": [events], "allocator_settings": {"a": "b", "c": -1}}
    path.write_bytes(pickle.dumps(whole, protocol))
    assert read_snapshot(path) == whole


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
