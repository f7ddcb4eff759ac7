"""Numbers that change with every step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import planner
from planner._torch import dynamo
from planner.errors import PlanWarning
from tests.side_by_side import assert_same, layers, left_by, no_plan_warnings


def _step(model: Any, x: torch.Tensor, beta: float | torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x) * beta
    return loss


def _annealed(step: Callable[..., torch.Tensor], kind: Callable[[float], Any]) -> Callable[[Any], None]:
    def loop(model: Any) -> None:
        for at in range(6):
            step(model, torch.ones(16, 32), kind(at / 8)).backward()
            model.zero_grad()

    return loop


@pytest.mark.heavy
def test_a_number_that_changes_is_told_of_and_a_tensor_is_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamo, "MANY_CAPTURES", 4)
    model, *_ = layers()
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    planned = planner.step(_step, budget="min", solver="sqrt_n", costs="roofline")
    with pytest.warns(PlanWarning, match="has been captured 4 times.*as a tensor") as told:
        ours = left_by(model, _annealed(planned, float))
    assert len(told) == 1
    assert_same(ours, left_by(twin, _annealed(_step, float)))
    with no_plan_warnings():
        left = left_by(third, _annealed(planned, torch.tensor))
    assert_same(left, ours)
