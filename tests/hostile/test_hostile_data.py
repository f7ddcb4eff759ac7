"""Devices, measurements and recorded snapshots from others, hostile: each is refused in words."""

import json
import logging
import pickle
import struct
import tracemalloc
from pathlib import Path
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


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*layers).train()


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
@pytest.mark.parametrize("numbers", [[7] * 30, [2**62] * 3])
def test_a_plan_is_made_whatever_was_remembered(
    numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what it leaves there is nobody else's
    planner.plan(_model(), (torch.ones(64, 8),), budget="min", costs="measured")
    for path in (default_cache_path(), default_cache_path().with_name("seconds.json")):
        before = path.read_text()
        document = json.loads(before)
        for entries in document["environments"].values():
            entries.update(dict.fromkeys(entries, numbers))
        path.write_text(json.dumps(document))
        planner.plan(_model(), (torch.ones(64, 8),), budget="min", costs="measured")
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
