"""The file that remembers measured workspaces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.costs.workspace import OpMemory, WorkspaceMeter
from planner.training_step.call import Call
from tests.costs.test_workspace import aten, meta


def test_a_file_is_read_once_and_again_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.json"
    calls = [Call(aten.neg.default, (meta(3),)), Call(aten.abs.default, (meta(3),))]
    WorkspaceMeter("cpu", path).measure(calls[:1])
    read, original = [], json.load
    monkeypatch.setattr(json, "load", lambda file: read.append(1) or original(file))
    for _ in range(3):
        assert WorkspaceMeter("cpu", path).measure(calls[:1]) == [OpMemory(0, (12,))]
    assert len(read) == 1
    document = json.loads(path.read_text())
    (entries,) = document["environments"].values()
    entries.update({key: [7, 12] for key in entries})
    path.write_text(json.dumps(document))
    assert WorkspaceMeter("cpu", path).measure(calls[:1]) == [OpMemory(7, (12,))]
    WorkspaceMeter("cpu", path).measure(calls)
    assert WorkspaceMeter("cpu", path).measure(calls[:1]) == [OpMemory(7, (12,))]


def never_run(self: WorkspaceMeter, chunk: Any) -> Any:
    raise AssertionError(f"ran {list(chunk)}")


def test_a_second_meter_takes_its_answers_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new directory" / "cache.json"
    calls = [
        Call(aten.add.Tensor, (meta(9, dtype=torch.bfloat16), meta(9))),
        Call(aten.neg.default, (meta(3),)),
    ]
    first = WorkspaceMeter("cpu", path).measure(calls)
    monkeypatch.setattr(WorkspaceMeter, "_run_on_cpu", never_run)
    assert WorkspaceMeter("cpu", path).measure(calls) == first
    with pytest.raises(AssertionError, match="ran"):
        WorkspaceMeter("cpu", None).measure(calls)


def test_another_number_of_threads_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    call = Call(aten.neg.default, (meta(3),))
    threads = torch.get_num_threads()
    WorkspaceMeter("cpu", path).measure([call])
    try:
        torch.set_num_threads(threads + 1)
        WorkspaceMeter("cpu", path).measure([call])
    finally:
        torch.set_num_threads(threads)
    environments = json.loads(path.read_text())["environments"]
    assert len(environments) == 2
    assert all(str(torch.__version__) in name for name in environments)


def test_what_others_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    one, other = WorkspaceMeter("cpu", path), WorkspaceMeter("cpu", path)
    one.measure([])
    other.measure([Call(aten.neg.default, (meta(3),))])
    one.measure([Call(aten.abs.default, (meta(3),))])
    (entries,) = json.loads(path.read_text())["environments"].values()
    assert len(entries) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"format": 6}',
        b'{"format": 99, "environments": {}}',
        b'{"format": 6, "environments": {"x": 3}}',
        b'{"format": 6, "environments": {"x": {"y": []}}}',
        b'{"format": 6, "environments": {"x": {"y": [-1]}}}',
        b'{"format": 6, "environments": {"x": {"y": ["1"]}}}',
        b'{"format": 6, "environments": {"x": {"y": 7}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_cache_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cache.json"
    path.write_bytes(content)
    call = Call(aten.neg.default, (meta(3),))
    assert WorkspaceMeter("cpu", path).measure([call]) == [OpMemory(0, (12,))]
    (entries,) = json.loads(path.read_text())["environments"].values()
    assert list(entries.values()) == [[0, 12]]


def test_a_cache_that_cannot_be_written_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "cache.json", tmp_path):
        caplog.clear()
        meter = WorkspaceMeter("cpu", path)
        assert meter.measure([Call(aten.neg.default, (meta(3),))]) == [OpMemory(0, (12,))]
        assert "could not be kept" in caplog.text


def test_the_default_cache_is_in_the_user_s_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    WorkspaceMeter("cpu").measure([Call(aten.neg.default, (meta(3),))])
    assert [path.name for path in tmp_path.rglob("*.json")] == ["workspace.json"]


def test_what_a_call_makes_is_measured_in_its_own_type() -> None:
    """A call that names no type makes tensors of the default one, which may be another by then."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x) * torch.ones(64, 8)).square().mean()

    plans = []
    for kind in (torch.float32, torch.float64):
        torch.set_default_dtype(kind)
        try:
            model, x = Made(), torch.randn(64, 8)
            plans.append(planner.plan(model, (x,), budget="100%", backend="replay", costs="roofline"))
            report = planner.verify(model, (x,), plan=plans[-1], repeats=0)
        finally:
            torch.set_default_dtype(torch.float32)
        assert report.measured_dynamic_peak_bytes == plans[-1].predicted.dynamic_peak_bytes
    assert plans[1].baseline.dynamic_peak_bytes > 1.9 * plans[0].baseline.dynamic_peak_bytes
