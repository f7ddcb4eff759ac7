"""Every real model of the zoo, with a quarter of its batch: right, and as predicted."""

import copy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import planner
from tests.zoo import REAL, build

pytestmark = pytest.mark.timed

CONVOLUTIONAL = {"unet"}


def _in_small(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the zoo, and a quarter of its batch."""
    model, args, kwargs = build(name)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x[: max(2, len(x) // 4)], (args, kwargs))
    return model, args, kwargs


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted({*REAL} - {"gpt", "resnet", "gpt2", "resnet50"}))  # as bert and unet
def test_a_real_model_trains_within_its_budget(name: str) -> None:
    model, args, kwargs = _in_small(name)
    plans = planner.sweep(model, args, kwargs, budgets=["60%", "min"], time_limit=9)
    for plan, larger in zip(plans, [None, *plans], strict=False):
        if plan.target.budget_bytes is not None:
            assert plan.predicted.peak_bytes <= plan.target.budget_bytes
        if larger is not None:
            assert plan.predicted.peak_bytes <= larger.predicted.peak_bytes
    for plan in plans[1:]:
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
        assert report.ok, report.problems
        measured, predicted = report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes
        assert 0.97 * predicted <= measured <= 1.002 * predicted
        eager, expected = (
            report.baseline_measured_dynamic_peak_bytes,
            report.baseline_predicted_dynamic_peak_bytes,
        )
        assert abs(eager - expected) <= (0.03 if name in CONVOLUTIONAL else 0.01) * eager


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "mebibytes"), [("gpt", 36), ("resnet", 79)])
def test_sqrt_n_reaches_low_peaks_at_one_extra_forward(name: str, mebibytes: int) -> None:
    from planner.capture.capture import capture
    from planner.costs.devices import find_device
    from planner.problem.build import build_problem
    from planner.training_step.step import Step
    from solvers import sqrt_n

    model, args, kwargs = build(name)
    graph = build_problem(capture(model, Step(args, kwargs)), find_device("cpu"), None).graph
    solution = sqrt_n.solve(graph, None)
    assert solution.peak_bytes <= mebibytes * 2**20
    assert solution.seconds <= graph.base_seconds + sum(graph.seconds[: graph.forward_length])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("lstm", torch.optim.AdamW)],
)
def test_two_planned_steps_train_the_same_weights(name: str, optimizer: type[torch.optim.Optimizer]) -> None:
    model, args, kwargs = _in_small(name)
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, args, kwargs, budget="min", time_limit=3)
    for network in (model, twin):
        torch.manual_seed(5)
        chosen = optimizer(network.parameters(), lr=1e-2)  # type: ignore[call-arg]
        for _ in range(2):
            chosen.zero_grad()
            output = network(*args, **kwargs)
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
            chosen.step()
    for (key, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
