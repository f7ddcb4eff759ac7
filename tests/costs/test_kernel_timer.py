"""Measured costs: each operation timed once, remembered, and named in the plan."""

import statistics
from pathlib import Path

import pytest
import torch

import planner
from planner.costs import kernel_timer
from planner.costs.devices import find_device
from planner.costs.kernel_timer import MeasuredCosts
from planner.costs.roofline import roofline
from planner.costs.workspace import TimedRun, WorkspaceMeter
from planner.planning.cost_source import CostsError
from planner.training_step.call import Call
from tests.small import small_gpt

aten = torch.ops.aten


def costs(path: Path | None, reported: list[str] | None = None) -> MeasuredCosts:
    progress = None if reported is None else lambda number, name: reported.append(name)
    return MeasuredCosts(WorkspaceMeter("cpu", None), roofline(find_device("cpu")), path, progress)


def square(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(size, size), torch.empty(size, size), torch.empty(size, size)


def test_more_work_takes_longer_and_views_nothing() -> None:
    timer = costs(None)
    small, large = (timer.seconds(aten.mm.default, (a, b), {}, c) for a, b, c in (square(32), square(512)))
    assert large > small > 0
    a = torch.empty(8, 8)
    assert timer.seconds(aten.t.default, (a,), {}, a.t()) == 0.0


def test_each_operation_is_timed_once_and_remembered_on_disk(tmp_path: Path) -> None:
    reported: list[str] = []
    path = tmp_path / "seconds.json"
    a, b, c = square(64)
    first = costs(path, reported)
    seconds = first.seconds(aten.mm.default, (a, b), {}, c)
    assert first.seconds(aten.mm.default, (a, b), {}, c) == seconds
    assert reported == ["aten.mm.default"]
    first.save()
    again = costs(path, reported)
    assert again.seconds(aten.mm.default, (a, b), {}, c) == pytest.approx(seconds, abs=1e-9)
    assert len(reported) == 1


def test_timing_ends_when_it_has_taken_long_enough_and_begins_with_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, reported = roofline(find_device("cpu")), list[str]()
    timer = MeasuredCosts(
        WorkspaceMeter("cpu", None), known, None, lambda n, name: reported.append(name), most_seconds=1.5
    )
    monkeypatch.setattr(timer, "_timed", lambda call: 1e-3)
    monkeypatch.setattr(kernel_timer.time, "process_time", iter(range(100)).__next__)
    a, b, c = square(512)
    both = [(aten.mm.default, (a, b)), (aten.tanh.default, (a,))]
    calls = [Call(op, (a,), {}) for op in (aten.t.default, aten.tanh.default, aten.exp.default)]
    timer.time_largest_first([*calls, Call(aten.mm.default, (a, b), {})], [a.t(), c, c, c])
    assert reported == ["aten.mm.default", "aten.tanh.default"]  # a second each
    assert not timer.left_out
    assert timer.seconds(aten.mm.default, (a, b), {}, c) == 1e-3
    longer = [1e-3 / known.seconds(func, args, {}, c) for func, args in both]
    for left_out, of in ((aten.exp.default, statistics.median(longer)), (aten.tanh.default, longer[1])):
        half = a[:256]
        predicted = known.seconds(left_out, (half,), {}, half)
        assert timer.seconds(left_out, (half,), {}, half) == pytest.approx(of * predicted)
    assert len(timer.left_out) == 2
    assert not timer.failures


def test_what_cannot_be_run_costs_what_the_roofline_says() -> None:
    timer = costs(None)
    huge = torch.empty(1 << 24, 1 << 24, device="meta")
    seconds = timer.seconds(aten.mm.default, (huge, huge), {}, huge)
    assert seconds == roofline(find_device("cpu")).seconds(aten.mm.default, (huge, huge), {}, huge)
    assert "MemoryError" in next(iter(timer.failures.values()))


@pytest.mark.heavy
def test_a_plan_says_what_it_used_and_changes_nothing() -> None:
    model, args, _ = small_gpt()
    state = torch.get_rng_state()
    before = [p.detach().clone() for p in model.parameters()]
    measured = planner.plan(model, args, budget="60%", costs="measured", solver="sqrt_n")
    predicted = planner.plan(model, args, budget="60%", costs="roofline", solver="sqrt_n")
    assert (measured.target.costs, predicted.target.costs) == ("measured", "roofline")
    assert measured.predicted.seconds != predicted.predicted.seconds
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_costs_of_a_device_that_is_not_here_cannot_be_measured() -> None:
    model, args, _ = small_gpt()
    with pytest.raises(CostsError, match=r"not on T4.*costs='roofline'"):
        planner.plan(model, args, budget="60%", device="T4", costs="measured")
    with pytest.raises(CostsError, match="'auto', 'roofline' or 'measured'"):
        planner.plan(model, args, budget="60%", costs="guessed")  # type: ignore[arg-type]


def test_a_gpu_is_kept_busy_while_what_is_timed_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def elapsed_time(self, other: object) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    start, end = kernel_timer._clock(torch.device("cuda"))
    before = start()
    done.append("run")
    assert end() - before == 2e-3
    assert done == ["synchronize", "sleep", "record", "run", "record", "synchronize"]


@pytest.mark.parametrize(("first", "second", "runs"), [([], 1e-3, 4), ([0.01], 0.025, 2), ([0.5], 1.0, 1)])
def test_the_least_of_several_runs_counts_and_what_takes_long_does_not_run_often(
    first: list[float], second: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ran = iter(range(100)), list[int]()
    monkeypatch.setattr(kernel_timer.time, "process_time", lambda: next(clock) * second)
    found = kernel_timer._process_seconds(lambda: ran.append(1), torch.zeros(1), first)
    assert len(ran) == runs
    assert found == pytest.approx(min([*first, second]))


@pytest.mark.parametrize(
    ("seconds", "alone", "again"), [(3.0, True, False), (3.0, False, True), (1e-3, True, True)]
)
def test_what_took_long_when_its_memory_was_measured_runs_again_only_where_it_had_to_wait(
    seconds: float, alone: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, ran = WorkspaceMeter("cpu", None), list[bool]()
    timer = MeasuredCosts(meter, roofline(find_device("cpu")), None)
    monkeypatch.setattr(meter, "run_of", lambda call: TimedRun(seconds, alone))
    monkeypatch.setattr(kernel_timer, "_process_seconds", lambda *given: ran.append(True) or 2.0)
    a, b, c = square(8)
    assert timer.seconds(aten.mm.default, (a, b), {}, c) == (2.0 if again else seconds)
    assert ran == [True] * again


def test_a_measured_run_is_timed() -> None:
    meter, (a, b, _) = WorkspaceMeter("cpu", None), square(64)
    call = Call(aten.mm.default, (a, b), {})
    assert meter.run_of(call) is None
    meter.measure([call])
    run = meter.run_of(call)
    assert run is not None
    assert run.seconds > 0


def test_no_more_is_read_between_two_runs_than_the_step_holds() -> None:
    cpu = torch.device("cpu")
    assert kernel_timer._read_between(cpu, 100_000) == 131_072
    assert kernel_timer._read_between(cpu, 1) == 1
    assert kernel_timer._read_between(cpu, 2**50) == kernel_timer._read_between(cpu, None) > 2**20
    assert kernel_timer._read_between(torch.device("cuda"), 2**50) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_made_up_floats_differ_and_are_about_one(dtype: torch.dtype) -> None:
    """Also in a storage that is longer than the values, and where dimensions are expanded or swapped; in
    memory of the call before too."""
    meter = WorkspaceMeter("cpu", None)
    wide, thin = torch.ones(300, 700, dtype=dtype).t(), torch.ones(1, 70, dtype=dtype).expand(5, 70)
    other, mask = torch.zeros(4, dtype=torch.long), torch.zeros(3, dtype=torch.bool)
    for _ in range(2):
        with meter.arguments(Call(aten.cat.default, ([wide, thin, other, mask],), {})) as (args, _kwargs):
            for tensor in args[0][:2]:
                assert tensor.unique().numel() > 30
                assert float(tensor.min()) >= 0.5
                assert float(tensor.max()) <= 1.0
                tensor.zero_()
            assert not args[0][2].any()
            assert not args[0][3].any()
            assert [made.stride() for made in args[0]] == [t.stride() for t in (wide, thin, other, mask)]
    meter.made_up.let_go()
