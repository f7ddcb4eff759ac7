"""Every real model of the zoo at three budgets: right, and as predicted."""

import copy

import pytest
import torch

import planner
from planner.planfile.plan import Plan
from tests.zoo import REAL, build

CONVOLUTIONAL = {"resnet", "unet", "resnet50"}


@pytest.mark.heavy
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_trains_within_its_budget(name: str) -> None:
    model, args, kwargs = build(name)
    least: Plan | None = None
    for budget in ("80%", "60%", "min"):
        plan = planner.plan(model, args, kwargs, budget=budget, time_limit=3)
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
        assert report.ok, report.problems
        measured, predicted = report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes
        assert 0.97 * predicted <= measured <= 1.002 * predicted
        eager, expected = (
            report.baseline_measured_dynamic_peak_bytes,
            report.baseline_predicted_dynamic_peak_bytes,
        )
        assert abs(eager - expected) <= (0.03 if name in CONVOLUTIONAL else 0.01) * eager
        if plan.target.budget_bytes is not None:
            assert plan.predicted.peak_bytes <= plan.target.budget_bytes
        if least is not None:
            assert plan.predicted.peak_bytes <= least.predicted.peak_bytes
        least = plan


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "mebibytes"), [("gpt", 36), ("resnet", 79), ("unet", 62)])
def test_sqrt_n_reaches_low_peaks_at_one_extra_forward(name: str, mebibytes: int) -> None:
    from planner.capture.capture import capture
    from planner.costs.devices import find_device
    from planner.problem.build import build_problem
    from planner.training_step.step import Step
    from solvers.chains import sqrt_n

    model, args, kwargs = build(name)
    graph = build_problem(capture(model, Step(args, kwargs)), find_device("cpu"), None).graph
    solution = sqrt_n.solve(graph, None)
    assert solution.peak_bytes <= mebibytes * 2**20
    assert solution.seconds <= graph.base_seconds + sum(graph.seconds[: graph.forward_length])


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50", "lstm"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_two_planned_steps_train_the_same_weights(name: str, optimizer: type[torch.optim.Optimizer]) -> None:
    model, args, kwargs = build(name)
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
