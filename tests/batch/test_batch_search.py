"""The largest batch: it fits, one more does not, and its figures are those of its plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
import planner.planning.prepare as planning_prepare
from planner.batch.interpolate import SizedSteps
from planner.batch.max_batch import _check_samples
from planner.batch.points import MaxBatch
from planner.costs.devices import find_device
from planner.costs.optimizer_step import OptimizerStep, optimizer_step
from planner.errors import BudgetError
from planner.planning import one_backend
from planner.planning.options import StepKeywords, read_options
from planner.planning.prepared import Prepared
from planner.training_step.inputs import InputError
from planner.training_step.step import Step
from tests.small import small_gpt
from tests.zoo import WithLoss

MIB = 2**20


def batches(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros((2, batch, 32), dtype=torch.long)
    return words[0], words[1]


def lengths(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros((2, 8, length), dtype=torch.long)
    return words[0], words[1]


@pytest.fixture(scope="module")
def found() -> MaxBatch:
    return planner.max_batch(
        small_gpt(layers=1)[0], batches, "8MiB", optimizer="AdamW", max_overhead=0.25, solver="sqrt_n"
    )


@pytest.mark.heavy
def test_the_largest_batch_fits_and_the_next_does_not(found: MaxBatch) -> None:
    model = small_gpt(layers=1)[0]
    options: dict[str, Any] = {"optimizer": "AdamW", "solver": "sqrt_n", "encodings": "none"}
    plan = planner.plan(model, batches(found.batch), budget="8MiB", **options)
    assert plan.whole_step is not None
    assert plan.whole_step.total_bytes <= 8 * MIB
    reference = found.unplanned
    assert reference is not None
    assert found.largest.overhead <= 0.25
    try:
        larger = planner.plan(model, batches(found.batch + 1), budget="8MiB", **options)
    except planner.InfeasibleBudget:
        return
    unplanned = planner.plan(model, batches(reference.batch), budget="100GiB", **options).baseline
    assert larger.predicted.seconds / (found.batch + 1) > 1.25 * unplanned.seconds / reference.batch


@pytest.mark.heavy
def test_the_measured_step_of_the_largest_batch_is_within_the_budget(found: MaxBatch) -> None:
    report = planner.verify(small_gpt(layers=1)[0], batches(found.batch), plan=found.plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == found.plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_the_largest_unplanned_batch_is_the_one_that_just_fits(found: MaxBatch) -> None:
    assert found.unplanned is not None
    totals = []
    for batch in (found.unplanned.batch, found.unplanned.batch + 1):
        model = small_gpt(layers=1)[0]
        plan = planner.plan(model, batches(batch), budget="100GiB", optimizer="AdamW", solver="none")
        assert plan.baseline_whole_step is not None
        totals.append(plan.baseline_whole_step.total_bytes)
    assert totals[0] <= 8 * MIB < totals[1]


@pytest.mark.heavy
def test_largest_and_fastest_are_both_reported(found: MaxBatch) -> None:
    assert found.ratio is not None
    assert found.ratio > 1.5
    assert found.captures <= 5
    assert found.largest.captured
    assert found.largest.batch == found.batch == found.points[-1].batch
    assert found.fastest.samples_per_second >= found.largest.samples_per_second
    assert found.plan.whole_step is not None
    assert found.largest.total_bytes == found.plan.whole_step.total_bytes


@pytest.mark.heavy
def test_a_length_whose_bytes_grow_with_its_square() -> None:
    model = small_gpt(layers=1)[0]
    model.positions = torch.nn.Embedding(2048, 32)
    found = planner.max_batch(model, lengths, "16MiB", solver="checkpoint_all", max_overhead=0.5)
    assert found.plan.predicted.peak_bytes <= 16 * MIB
    assert found.unplanned is not None
    assert found.unplanned.captured
    assert found.unplanned.total_bytes <= 16 * MIB


@pytest.mark.heavy
def test_a_budget_for_a_gpu_is_for_all_that_the_step_takes_of_it() -> None:
    gpu = replace(find_device("V100-32GB"), context_bytes=2 * MIB, library_bytes=MIB)
    found = planner.max_batch(
        small_gpt(layers=1)[0],
        batches,
        "64MiB",
        device=gpu,
        optimizer="Adam",
        solver="checkpoint_all",
        max_overhead=None,
    )
    whole = found.plan.whole_step
    assert whole is not None
    assert whole.total_bytes <= 64 * MIB
    assert whole.context_bytes == 2 * MIB
    assert whole.library_bytes == MIB
    assert whole.reserved_bytes % (2 * MIB) == 0
    assert found.largest.reserved_bytes == whole.reserved_bytes
    assert found.largest.allocated_bytes == whole.allocated_bytes < whole.reserved_bytes


@pytest.mark.heavy
def test_where_not_one_sample_fits_the_least_is_reported() -> None:
    with pytest.raises(planner.InfeasibleBudget, match="one sample needs") as caught:
        planner.max_batch(small_gpt(layers=1)[0], batches, "100kB", solver="sqrt_n")
    assert caught.value.minimum_bytes > 100_000


@pytest.mark.parametrize("budget", ["60%", "min"])
def test_a_budget_that_depends_on_the_batch_is_refused(budget: str) -> None:
    with pytest.raises(BudgetError, match="depends on the batch"):
        planner.max_batch(small_gpt(layers=1)[0], batches, budget)


def test_arguments_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match=r"make_args\(4\)"):
        planner.max_batch(small_gpt(layers=1)[0], lambda batch: batch, "8MiB")


def test_inputs_of_fewer_samples_than_there_are_in_a_batch_are_refused() -> None:
    data = torch.empty(100, 32)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh())
    with pytest.raises(InputError, match=r"makes 100 samples, and make_args\(4\) .* pass most=100"):
        planner.max_batch(model, lambda batch: (data[:batch],), "300KiB")
    # Exact, rounded up, and dimensions that are none of samples.
    of_others = [(4, 231), (4, 232), (2, 100), (5, 100), (4, 4)]
    for first, found in of_others:
        _check_samples(4, [torch.Size([first, 7])], 231, [torch.Size([found, 7])])


def test_inputs_that_are_the_same_for_each_batch_are_refused() -> None:
    with pytest.raises(InputError, match=r"make_args\(4\) and make_args\(\d+\) take the same memory"):
        planner.max_batch(torch.nn.Linear(8, 8), lambda _batch: torch.ones(4, 8), "8MiB")


def test_what_does_not_depend_on_the_batch_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*args: Any) -> OptimizerStep:
        asked.append(args[0])
        return optimizer_step(*args)

    monkeypatch.setattr(one_backend, "optimizer_step", counted)
    model = WithLoss(torch.nn.Linear(8, 4))
    options = read_options("max_batch", StepKeywords, {"optimizer": "Adam"})

    def capture(size: int, like: Prepared | None) -> Prepared:
        step = Step((torch.randn(size, 8), torch.zeros(size, dtype=torch.long)))
        return planning_prepare.prepare(model, step, options, like=like)

    steps = SizedSteps(capture)
    first, second = steps.capture(2), steps.capture(5)
    assert asked == ["Adam"]
    assert first.footprint.optimizer.state_bytes >= 2 * 4 * (8 * 4 + 4)
    assert first.footprint.optimizer == second.footprint.optimizer
    assert second.footprint.resident.input_bytes > first.footprint.resident.input_bytes


def test_no_batch_above_the_most_is_tried() -> None:
    asked = []

    def one(size: int) -> tuple[torch.Tensor]:
        asked.append(size)
        return (torch.ones(size, 32),)

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    assert planner.max_batch(model, one, "1MiB", most=1, loss=torch.sum).batch == 1
    assert set(asked) == {1}


def test_one_sample_needs_the_least_that_its_solver_reaches() -> None:
    def make(size: int) -> tuple[torch.Tensor]:
        return (torch.ones(500 * size, 8),)

    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Tanh()) for _ in range(4))
    )
    given: dict[str, Any] = {"budget": "60KiB", "solver": "lower_sets", "loss": torch.sum}
    with pytest.raises(planner.InfeasibleBudget) as alone:
        planner.plan(model, make(1), encodings="none", **given)
    with pytest.raises(planner.InfeasibleBudget) as searched:
        planner.max_batch(model, make, max_overhead=None, **given)
    assert searched.value.minimum_bytes == alone.value.minimum_bytes
