"""A step that is captured once and planned several times."""

from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.planning.options import OptionError
from planner.problem.selection import SelectionError
from planner.training_step.inputs import InputError
from tests.side_by_side import Layers, layers


def _prepared() -> tuple[nn.Module, tuple[torch.Tensor], planner.PreparedStep]:
    model, args, _ = layers(lambda: Layers(2))
    return model, args, planner.prepare(model, args)


def test_its_plans_are_those_of_plan() -> None:
    model, args, prepared = _prepared()
    assert "PreparedStep of Layers" in repr(prepared)
    assert prepared.plan("min", solver="sqrt_n") == planner.plan(model, args, budget="min", solver="sqrt_n")
    kept = prepared.plan("min", solver="sqrt_n", keep=["layers.0"])
    assert kept == planner.plan(model, args, budget="min", solver="sqrt_n", keep=["layers.0"])
    assert kept != prepared.plan("min", solver="sqrt_n")


def test_what_is_said_when_it_is_prepared_holds_for_its_plans() -> None:
    model, args, _ = layers(lambda: Layers(1))
    prepared = planner.prepare(model, args, effort="best", encodings="none")

    def made_with(**options: Any) -> tuple[str, str]:
        remembered: Any = prepared.plan("100%", **options).made_with
        return remembered.effort, remembered.encodings

    assert made_with() == ("best", "none")
    assert made_with(effort="fast") == ("fast", "none")
    assert made_with() == ("best", "none")


def test_what_is_wrong_is_said_and_the_step_stays_of_use() -> None:
    model, _, prepared = _prepared()
    with pytest.raises(OptionError, match="keyword argument 'outputs'"):
        prepared.plan("min", outputs="dropped")  # type: ignore[call-arg]
    with pytest.raises(planner.BudgetError):
        prepared.plan("12 bananas")
    with pytest.raises(planner.InfeasibleBudget):
        prepared.plan("1%", solver="sqrt_n")
    with pytest.raises(SelectionError, match=r"layers\.9"):
        prepared.plan("min", keep=["layers.9"])
    frozen, part = model.get_parameter("layers.1.0.bias"), model.get_submodule("layers.1.2")
    frozen.requires_grad_(False)
    with pytest.raises(InputError, match=r"layers\.1\.0\.bias has another requires_grad than at"):
        prepared.plan("min")
    frozen.requires_grad_()
    part.eval()
    with pytest.raises(InputError, match=r"layers\.1\.2 is in another mode"):
        prepared.plan("min")
    model.eval()  # all of it: the plan is for training all the same
    assert prepared.plan("min", solver="sqrt_n").graphs[0].recomputed
    model.get_submodule("layers.0")[0] = nn.Linear(32, 64, bias=False)  # type: ignore[operator]
    with pytest.raises(InputError, match="prepare it again"):
        prepared.plan("min")
