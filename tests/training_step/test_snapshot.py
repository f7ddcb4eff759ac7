"""Predicted memory in PyTorch's and Chrome's viewers, and recorded runs replayed under other settings."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda._memory_viz as viewer
from torch import nn
from typer.testing import CliRunner

import planner
from planner.allocator.recorded import Replay, SnapshotError, read_snapshot, recorded_run, replay
from planner.allocator.settings import AllocatorSettings
from planner.allocator.snapshot import RecordedLoop, chrome_trace, record, snapshot
from planner.allocator.training_loop import EXPANDABLE, TrainingLoop, reservation, step_allocations
from planner.cli.commands import app

M = 1 << 20

LOOP = TrainingLoop(
    resident=(3 * M, 700),
    step=step_allocations(
        start=[0, 1, 2, 3],
        end=[3, 1, 4, 3],
        sizes=[30 * M, 400_000, 12 * M, 5 * M],
        workspace=[0, 2 * M, 0, 0],
        names=["a @ first", "b @ ", "c @ last", "d @ last"],
        backward_from=2,
        seconds=[0.25, 0.5, 1.0, 0.0],
        operations=["mm @ first", "relu @ ", "mm_backward @ last", "view @ last"],
    ),
    libraries=(8 * M, 8 * M),
    making=step_allocations(start=[0, 0], end=[1, 0], sizes=[6 * M, M], workspace=[0]),
    steady=step_allocations(start=[0], end=[0], sizes=[M], workspace=[0]),
)


def raw(lines: str, script: Any = None) -> str:
    """In the place of the picture, which the viewer makes by a script that it downloads."""
    return lines


@pytest.fixture(params=["", "expandable_segments:True"])
def recorded(request: pytest.FixtureRequest) -> RecordedLoop:
    return record(LOOP, AllocatorSettings.parse(request.param))


def test_pytorchs_viewer_opens_it(recorded: RecordedLoop, tmp_path: Path) -> None:
    path = tmp_path / "loop.pickle"
    path.write_bytes(pickle.dumps(snapshot(recorded)))
    found = pickle.loads(path.read_bytes())
    # What stays: the resident tensors, the libraries' workspaces, the optimizer's state.
    stays = 3 * M + 700 + 16 * M + 6 * M
    lines = viewer.segments(found, raw).splitlines()
    used = [line for line in lines if ";active_allocated;" in line and "<gaps>" not in line]
    assert sum(int(line.rpartition(" ")[2]) for line in used) == stays
    assert "active_allocated" in viewer.memory(found, raw)
    assert "making" not in viewer.segsum(found)
    assert "cudaMalloc" in viewer.trace(found) or "segment_map" in viewer.trace(found)
    for how in ({}, {"plot_segments": True}, {"filter_freed": True}):
        assert "MemoryViz" in viewer.trace_plot(pickle.loads(path.read_bytes()), **how)
    assert "MemoryViz" in viewer.segment_plot(found)


def test_its_history_is_that_of_the_loop(recorded: RecordedLoop) -> None:
    found = snapshot(recorded)
    (events,) = found["device_traces"]
    reserved = most = 0
    for event in events:
        reserved += event["size"] * (event["action"] in ("segment_alloc", "segment_map"))
        reserved -= event["size"] * (event["action"] in ("segment_free", "segment_unmap"))
        most = max(most, reserved)
    assert most == recorded.allocator.peak_reserved_bytes
    assert most == reservation(LOOP, recorded.allocator.settings).reserved_bytes
    assert sum(s["total_size"] for s in found["segments"]) == reserved
    made = next(e for e in events if e["frames"][0]["name"] == "c")
    assert made["frames"][0]["filename"] == "last"
    assert made["frames"][1]["name"] == "backward of step 1"
    assert made["time_us"] == 750_000
    assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events)


def test_chromes_trace_has_operations_and_memory(recorded: RecordedLoop) -> None:
    events = json.loads(json.dumps(chrome_trace(recorded)))["traceEvents"]
    slices = [(e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    first = [("mm", "forward", 0, 250_000), ("relu", "forward", 250_000, 500_000),
             ("mm_backward", "backward", 750_000, 1_000_000)]  # fmt: skip
    assert slices[:3] == first
    begin = slices[3][2]  # the second step's, after the optimizer's
    assert [(n, c, round(t - begin), d) for n, c, t, d in slices[3:]] == first
    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert max(c["reserved"] for c in counters) == recorded.allocator.peak_reserved_bytes
    assert max(c["allocated"] for c in counters) == recorded.allocator.peak_allocated_bytes
    assert counters[-1]["allocated"] == recorded.allocator.allocated_bytes


def test_a_history_that_is_replayed_gives_the_same(recorded: RecordedLoop) -> None:
    run = recorded_run(snapshot(recorded))
    assert run.before == ()
    assert run.peak_reserved_bytes == recorded.allocator.peak_reserved_bytes
    for settings in (AllocatorSettings(), EXPANDABLE):
        expected = reservation(LOOP, settings)
        assert replay(run, settings) == Replay(expected.reserved_bytes, expected.allocated_bytes)


def test_what_was_there_before_recording_began_is_there() -> None:
    recorded = record(LOOP)
    found = snapshot(recorded)
    events = found["device_traces"][0]
    # The resident tensors, and a block of the first step that is freed later, are from before.
    cut = next(i for i, e in enumerate(events) if e["frames"][0]["name"] == "b")
    found["device_traces"][0] = events[cut:]
    run = recorded_run(found)
    assert sorted(size for _, size, _ in run.before) == [700, 3 * M, 8 * M, 30 * M]
    assert run.peak_reserved_bytes == recorded.allocator.peak_reserved_bytes
    assert replay(run, AllocatorSettings()).reserved_bytes == recorded.allocator.peak_reserved_bytes
    assert replay(run, AllocatorSettings(), memory_bytes=20 * M).failed_at == 0


def test_snapshots_of_pytorch_without_addresses_of_blocks_are_read() -> None:
    block = {"size": 2 * M, "state": "active_allocated"}
    segment = {"address": 1 << 30, "total_size": 20 * M, "stream": 0, "device": 0,
               "blocks": [{"size": 18 * M, "state": "inactive"}, block]}  # fmt: skip
    event = {"action": "alloc", "addr": (1 << 30) + 18 * M, "size": 2 * M, "stream": 0}
    trace = [{"action": "free_completed", "addr": 5, "size": 512, "stream": 0}, event]
    run = recorded_run({"segments": [segment], "device_traces": [[], [], trace]}, device=2)
    assert [size for _, size, _ in run.before] == [512]
    assert recorded_run({"segments": [segment], "device_traces": [trace]}).peak_reserved_bytes == 20 * M


class Code:
    """Something that runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"nothing of the kind", "is no snapshot"),
        (pickle.dumps([1, 2]), "has no segments"),
        (pickle.dumps({"segments": [], "device_traces": [Code()]}), "builtins.print, which no snapshot does"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "_record_memory_history"),
        (pickle.dumps({"segments": [], "device_traces": [[{"addr": 1}]]}), "not as PyTorch writes it"),
        (
            pickle.dumps({"segments": 5, "device_traces": [[{"action": "alloc", "size": 1}]]}),
            "not as PyTorch",
        ),
    ],
)
def test_other_files_are_refused(content: bytes, expected: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "found.pickle"
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 2
    assert expected in result.stderr
    assert "it ran" not in result.output
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_snapshot(tmp_path / "none")


def test_a_recorded_run_from_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(snapshot(record(LOOP))))
    result = CliRunner().invoke(app, ["replay", str(path)])
    plain, expandable = (reservation(LOOP, s).reserved_bytes for s in (None, EXPANDABLE))
    assert f"{plain / M:.1f} MiB -> {expandable / M:.1f} MiB reserved" in " ".join(result.stdout.split())
    found = CliRunner().invoke(app, ["replay", str(path), "--instead", "max_split_size_mb:20", "--json"])
    assert json.loads(found.stdout)["recorded_reserved_bytes"] == plain
    answer = json.loads(found.stdout)
    assert answer["arena_reserved_bytes"] <= answer["default_reserved_bytes"] == plain
    short = CliRunner().invoke(app, ["replay", str(path), "--memory", "40MiB"])
    assert "out of memory at event" in short.stdout
    for share in ("min", "50%"):
        refused = CliRunner().invoke(app, ["replay", str(path), "--memory", share])
        assert (refused.exit_code, "expected bytes" in refused.stderr) == (2, True)


def test_a_recorded_run_is_told_of_segments_reserved_beforehand(tmp_path: Path) -> None:
    path, allocations = (
        tmp_path / "run.pickle",
        step_allocations(start=[0, 1, 2], end=[0, 1, 2], sizes=[30 * M, 50 * M, 90 * M], workspace=[0, 0, 0]),
    )
    path.write_bytes(pickle.dumps(snapshot(record(TrainingLoop((40 * M,), allocations)))))
    result = CliRunner().invoke(app, ["replay", str(path)])
    said = (
        "with one segment of 130.0 MiB reserved beforehand: 210.0 MiB -> 130.0 MiB reserved, by the defaults"
    )
    assert said in " ".join(result.stdout.split())


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), (torch.randn(5000, 64),)


def total(output: torch.Tensor) -> torch.Tensor:
    """For the command line."""
    return output.sum()


@pytest.mark.parametrize("of_the_plan", [{}, {"backend": "replay", "outputs": "dropped"}])
def test_a_plan_from_a_terminal(of_the_plan: dict[str, Any], tmp_path: Path) -> None:
    model, args = build()
    path = str(tmp_path / "plan.json")
    options: dict[str, Any] = {"loss": total, "device": "A100-80GB", "optimizer": "adamw", "solver": "sqrt_n"}
    plan = planner.plan(model, args, budget="min", **options, **of_the_plan)
    plan.save(path)
    common = [f"{__file__}:build", "--loss", f"{__file__}:total", "--optimizer", "adamw", "--json"]
    assert plan.whole_step is not None
    for name, reserved in ((["--plan", path], plan.whole_step.reserved_bytes), ([], None)):
        file = tmp_path / "out.pickle"
        device = [] if name else ["--device", "A100-80GB"]
        result = CliRunner().invoke(app, ["snapshot", *common, *name, *device, "-o", str(file)])
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert reserved in (None, said["reserved_bytes"])
        assert recorded_run(read_snapshot(file)).peak_reserved_bytes == said["reserved_bytes"]
    shown = json.loads(CliRunner().invoke(app, ["show", path, "--json"]).stdout)
    assert shown["reserved_bytes"] == plan.whole_step.reserved_bytes
    assert shown["total_bytes"] == plan.whole_step.total_bytes
    for wrong, message in (
        ([], "name a GPU"),
        (["--in-flight", "0"], "in_flight=0: expected"),
        (["--plan", path, "--outputs", "dropped"], "--outputs with --plan"),
    ):
        refused = CliRunner().invoke(app, ["snapshot", *common, *wrong, "-o", str(tmp_path / "out.json")])
        assert refused.exit_code == 2
        assert message in refused.stderr
