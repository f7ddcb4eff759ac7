"""Gradients that are there when a step begins are noticed, whichever parameters have them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers, layers, no_plan_warnings, plan_of

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


@pytest.mark.heavy
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
