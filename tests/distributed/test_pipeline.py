"""Two processes that are stages of a pipeline, each planned for the micro-batches that it has in flight."""

import gc
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

import planner
from planner._torch.distributed import pipelines_free_early
from planner.planfile.simulated import simulated
from planner.planning.options import OptionError
from planner.verification.measure import measure_peak
from tests.ranks import run_ranks, what_a_rank_says
from tests.side_by_side import counting_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

SCHEDULES = ("gpipe", "1f1b")
STEPS = 3


def _example() -> Any:
    return importlib.import_module("pipeline")


def _rank(folder: Path) -> None:
    for schedule in SCHEDULES:
        with warnings.catch_warnings():
            warnings.simplefilter("error", planner.PlanWarning)
            said = _trained(schedule)
        (folder / f"{schedule}.{dist.get_rank()}").write_text(said)


def _trained(schedule: str) -> str:
    example = _example()
    theirs = example.train(schedule, None, STEPS)
    plans: list[planner.Plan] = []
    plan_stage = example.plan_stage

    def planned(*given: Any) -> planner.Plan:
        plans.append(plan_stage(*given))
        return plans[-1]

    example.plan_stage = planned
    try:
        with counting_runs() as runs:
            ours = example.train(schedule, "70%", STEPS)
    finally:
        example.plan_stage = plan_stage
    unequal = [n for n, value in theirs.items() if not torch.equal(ours[n], value)]
    [plan] = plans
    there = plan.resident.gradient_bytes + _received_within_the_step(example)
    planned_peak = _measured(example, plan, schedule) - there
    unplanned_peak = _measured(example, None, schedule) - there
    # One more forward and backward, in which PyTorch's stage finds out what it sends.
    followed = runs.forward == 1 + STEPS * example.MICRO_BATCHES
    off = planned_peak / plan.predicted.dynamic_peak_bytes - 1
    off_without = unplanned_peak / plan.baseline.dynamic_peak_bytes - 1
    return (
        f"in flight {plan.target.in_flight}, followed {followed}, {unequal or 'all'} equal, "
        f"off {abs(off) < 1e-3 or off:}, unplanned {abs(off_without) < 0.01 or off_without}"
    )


def _received_within_the_step(example: Any) -> int:
    """Of activations, which plans count among what is there before: those of all micro-batches, as the last
    stage holds them by its losses until the step ends."""
    receives = dist.get_rank() > 0 and pipelines_free_early()
    elements = example.MICRO_BATCHES * example.SEQUENCES * example.CONTEXT * example.WIDTH
    return elements * torch.float32.itemsize if receives else 0


def _measured(example: Any, plan: planner.Plan | None, schedule: str) -> int:
    stage = example.build_stage()
    run = example.pipeline_of(stage if plan is None else plan.apply(stage), schedule)
    words = example.batch(0)
    run(words)
    stage.zero_grad()
    gc.collect()
    return measure_peak(lambda: run(words), "cpu").peak_bytes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each schedule; all in one pair of processes."""
    return run_ranks(_rank, tmp_path_factory, "pipeline")


@pytest.mark.heavy
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_hold_what_was_predicted_and_get_what_they_get_without_a_plan(
    schedule: str, outcomes: Path
) -> None:
    for rank in range(2):
        in_flight = _example().MICRO_BATCHES if schedule == "gpipe" else 2 - rank
        expected = f"in flight {in_flight}, followed True, all equal, off True, unplanned True"
        assert what_a_rank_says(outcomes, schedule, rank) == expected


def _stage(
    *more: torch.nn.Module, **options: Any
) -> tuple[torch.nn.Module, torch.Tensor, planner.PreparedStep]:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))]
    stage = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), *more)
    x = torch.randn(64, 32, requires_grad=True)
    return stage, x, planner.prepare(stage, (x,), **options)


def _measured_as_predicted(
    stage: torch.nn.Module, plan: planner.Plan, inputs: list[torch.Tensor], run: Callable[[], object]
) -> None:
    def measured() -> int:
        peaks = []
        for _ in range(2):  # the first fills caches
            for t in (*inputs, *stage.parameters()):
                t.grad = None
            gc.collect()
            peaks.append(measure_peak(run, "cpu").peak_bytes)
        return peaks[-1]

    assert measured() == plan.baseline.dynamic_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan.apply(stage)
        assert measured() == plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
@pytest.mark.parametrize(("count", "read"), [(1, True), (3, False)])
def test_what_is_sent_is_let_go_of_when_all_have_had_their_forward(
    monkeypatch: pytest.MonkeyPatch, count: int, read: bool
) -> None:
    """As pipelines do from PyTorch 2.15 on; what the backward reads is there until then."""
    monkeypatch.setattr(planner.training_step.step, "pipelines_free_early", lambda: True)
    wide = [] if read else [torch.nn.Linear(32, 2048)]  # so that the forward is where the peak is
    stage, x, step = _stage(*wide, in_flight=count, accumulate=False, outputs="dropped")
    plan = step.plan("100%" if count == 1 else "85%" if read else "98%")
    inputs = [x.detach().clone().requires_grad_() for _ in range(count)]

    def run() -> Any:
        outputs = [stage(x) for x in inputs]
        edges = [get_gradient_edge(output) for output in outputs]
        form = outputs[0].shape
        outputs.clear()
        for edge in edges:
            torch.autograd.backward([edge], [torch.ones(form)])
        return [x.grad for x in inputs]

    _measured_as_predicted(stage, plan, inputs, run)
    assert plan.resident.input_bytes == count * x.nbytes
    assert (
        simulated(planner.Plan.loads(plan.dumps())).timeline.peak_bytes == plan.predicted.dynamic_peak_bytes
    )


@pytest.mark.parametrize("count", [1, 3])
def test_several_in_flight_take_what_is_measured_of_them(count: int) -> None:
    """Forwards of all, then backwards of all, one after the other; what arrives is there before."""
    stage, x, step = _stage(in_flight=count, accumulate=False)
    plan = step.plan("80%" if count > 1 else "100%")
    inputs = [x.detach().clone().requires_grad_() for _ in range(count)]
    gradients = [torch.ones(64, 32) for _ in range(count)]

    def run() -> Any:
        left = [stage(x) for x in inputs]
        for output, gradient in zip(left, gradients, strict=True):
            output.backward(gradient)
        return left, [x.grad for x in inputs]

    _measured_as_predicted(stage, plan, inputs, run)
    assert plan.resident.input_bytes == count * 2 * x.nbytes  # and the gradients that arrive
    assert (
        simulated(planner.Plan.loads(plan.dumps())).timeline.peak_bytes == plan.predicted.dynamic_peak_bytes
    )
    assert f"{count} micro-batch" in plan.summary()


def test_more_in_flight_than_planned_are_warned_of() -> None:
    stage, x, step = _stage(in_flight=2, accumulate=False)
    step.plan("100%").apply(stage)
    held = [stage(x) for _ in range(2)]
    with pytest.warns(planner.PlanWarning, match=r"in_flight=2: the step may take more"):
        held.append(stage(x))


def test_gradients_that_are_there_are_counted_or_warned_of() -> None:
    stage, x, step = _stage(in_flight=2, accumulate=True)
    assert step.plan("100%").resident.gradient_bytes == sum(p.nbytes for p in stage.parameters())
    stage, x, step = _stage(in_flight=2, accumulate=False)
    step.plan("100%").apply(stage)
    stage(x).sum().backward()
    with pytest.warns(planner.PlanWarning, match="accumulate=True"):
        stage(x).sum().backward()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_flight": 0}, "a whole number, 1 or more"),
        ({"in_flight": 2, "parallel": "ddp:2"}, "expected none with parallel="),
        ({"in_flight": 2, "backend": "inductor"}, "stages of pipelines run eagerly"),
    ],
)
def test_what_cannot_be_planned_for_several_is_an_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        _stage(**options)


def test_what_knows_one_step_at_a_time_says_so() -> None:
    stage, x, _ = _stage()
    with pytest.raises(OptionError, match=r"in_flight= is for .* none for estimate\(\)"):
        planner.estimate(stage, (x,), in_flight=2)
