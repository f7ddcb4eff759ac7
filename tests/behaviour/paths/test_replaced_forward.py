"""A forward that is replaced after the plan was put in is said to be that, once."""

import functools
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import Layers, no_plan_warnings, plan_of


class _WithLogits(Layers):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.layers[0](self.run(x))
        return {"loss": logits.square().mean(), "logits": logits}


def _in_bfloat16(model: nn.Module) -> None:
    """What accelerator.prepare() does to a model with mixed precision."""
    forward = model.forward.__func__  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def mixed(self: nn.Module, *args: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output: dict[str, torch.Tensor] = forward(self, *args)
        return {name: value.float() for name, value in output.items()}

    model._original_forward = model.forward
    model.forward = MethodType(mixed, model)  # type: ignore[method-assign]


def _batch() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 32)


def test_it_is_said_once() -> None:
    x = _batch()
    model = _WithLogits(2).train()
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_of(model, (x,))
    plan.apply(model)
    _in_bfloat16(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", planner.PlanWarning)
        for _ in range(3):
            model(x)["loss"].backward()
            model.zero_grad()
    told = [str(w.message) for w in said if issubclass(w.category, planner.PlanWarning)]
    assert len(told) == 1
    assert "forward was replaced since the plan was put in" in told[0]
    assert "Plan after accelerator.prepare(...)" in told[0]


def test_one_that_is_planned_is_followed() -> None:
    x = _batch()
    model = _WithLogits(2).train()
    _in_bfloat16(model)
    plan = plan_of(model, (x,))
    plan.apply(model)
    with no_plan_warnings():
        for _ in range(2):
            model(x)["loss"].backward()
            model.zero_grad()


@pytest.mark.heavy
def test_so_is_one_that_is_planned_at_the_first_call() -> None:
    x = _batch()
    model = _WithLogits(2).train()
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
    _in_bfloat16(model)
    with no_plan_warnings():
        for _ in range(2):
            model(x)["loss"].backward()
            model.zero_grad()
