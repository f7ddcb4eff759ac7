"""Gradients that are there when a step begins are noticed, whichever parameters have them."""

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.planfile.budget import format_bytes
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.side_by_side import AfterALayer, Layers, layers, no_plan_warnings, plan_of

pytestmark = pytest.mark.heavy

TOLD = "were there already when the step began"


class FirstUnused(nn.Module):
    """Its first parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.body = nn.Linear(4, 4), Layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.body(x)
        return loss


def _add_up(model: Any, x: torch.Tensor) -> None:
    for _ in range(2):
        model(x).backward()


def test_the_first_parameter_gets_none() -> None:
    model, (x,), _ = layers(FirstUnused)
    plan_of(model, (x,)).apply(model)
    with pytest.warns(planner.PlanWarning, match=TOLD):
        _add_up(model, x)


def test_the_first_parameter_is_frozen_later() -> None:
    model, (x,), _ = layers()
    plan_of(model, (x,)).apply(model)
    model(x).backward()
    model.zero_grad()
    model.layers[0].requires_grad_(False)  # type: ignore[index, union-attr]
    with pytest.warns(planner.PlanWarning, match=TOLD):
        _add_up(model, x)


def test_they_are_planned_for_at_the_second_call() -> None:
    model, (x,), _ = layers(FirstUnused)
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
    _add_up(model, x)
    plan = installed_plan(model)
    assert plan is not None
    assert plan.resident.gradient_bytes == sum(p.nbytes for p in model.body.parameters())  # type: ignore[union-attr]


def _assigned(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _exchanged(model: nn.Module) -> None:
    layer: Any = model.layers[0][0]  # type: ignore[index, union-attr]
    layer.weight = nn.Parameter(layer.weight.detach().clone())


@pytest.mark.parametrize("exchange", [_assigned, _exchanged])
def test_parameters_that_are_exchanged_have_none_and_go(exchange: Callable[[nn.Module], None]) -> None:
    model, (x,), _ = layers()
    plan_of(model, (x,)).apply(model)
    with no_plan_warnings():
        model(x).backward()
    before = weakref.ref(model.layers[0][0].weight)  # type: ignore[index, union-attr]
    exchange(model)
    model.zero_grad()
    gc.unfreeze()  # what the fixture that keeps the heap small has set aside
    gc.collect()
    assert before() is None
    with pytest.warns(planner.PlanWarning, match=TOLD) as said:
        _add_up(model, x)
    assert "gradients of 0 B" not in str(said[0].message)
    assert len(said) == 1


def _let_go_between(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of a step as Lightning has it: the gradients of the last are there while its forward runs."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loss = model(x)
        model.zero_grad()
        loss.backward()

    step()
    model.zero_grad()
    peak = measure_peak(step, "cpu").peak_bytes
    model.zero_grad()
    return peak


def _over(plan: planner.Plan, model: nn.Module) -> int:
    """By how much what the forward holds, with gradients that are there, is more than the predicted peak."""
    forward = max(plan.timeline.bytes[: plan.timeline.forward_length])
    return forward + sum(p.nbytes for p in model.parameters()) - plan.predicted.dynamic_peak_bytes


def test_gradients_that_are_let_go_of_between_forward_and_backward_are_no_matter_where_they_fit() -> None:
    torch.manual_seed(0)
    model, x = Layers(2).train(), torch.randn(4096, 32)
    plan = plan_of(model, (x,), budget="min", outputs="dropped")
    assert _over(plan, model) < 0
    plan.apply(model)
    with no_plan_warnings():
        assert _let_go_between(model, x) == plan.predicted.dynamic_peak_bytes
    with pytest.warns(planner.PlanWarning, match=TOLD):  # those that stay are warned of all the same
        _add_up(model, x)


def test_it_is_said_how_much_more_a_step_takes_where_they_do_not_fit() -> None:
    model, (x,), _ = layers()
    plan = plan_of(model, (x,), budget="100%", outputs="dropped")
    over = _over(plan, model)
    assert over > 0
    plan.apply(model)
    with pytest.warns(planner.PlanWarning, match="freed between forward and backward") as said:
        peak = _let_go_between(model, x)
    assert peak == plan.predicted.dynamic_peak_bytes + over
    assert f"takes {format_bytes(over)} more than predicted" in str(said[0].message)
    assert len(said) == 1


class InAnObject(AfterALayer):
    """Its output is an object with the loss, which nothing takes apart."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(x))


def test_the_loss_is_in_an_object() -> None:
    model, x = InAnObject(torch.tanh), torch.randn(8, 64)
    planner.plan(model, x, budget="1GiB").apply(model)
    model(x).loss.backward()
    with pytest.warns(planner.PlanWarning, match=TOLD):
        model(x).loss.backward()


def test_sparse_ones_are_counted_by_what_they_hold() -> None:
    model, words = (
        nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 1, bias=False)),
        torch.arange(8),
    )
    planner.plan(model, words, loss=torch.sum, budget="1GiB").apply(model)
    model(words).sum().backward()
    there = 8 * 8 + 8 * 16 * 4 + 16 * 4  # indices and values of the rows; the gradient of the layer
    with pytest.warns(planner.PlanWarning, match=f"gradients of {there} B {TOLD}"):
        model(words).sum().backward()
