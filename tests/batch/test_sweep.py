"""Plans for many budgets."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.small import graph_break_model, small_gpt


@pytest.mark.heavy
def test_a_sweep_is_monotone_and_each_plan_is_right() -> None:
    model, args, kwargs = small_gpt()
    plans = planner.sweep(model, args, kwargs, points=4, time_limit=10)
    assert len(plans) == 4
    peaks = [p.predicted.peak_bytes for p in plans]
    assert plans[0].overhead == 0.0
    assert plans[0].predicted.dynamic_peak_bytes == plans[0].no_recompute.dynamic_peak_bytes
    assert peaks == sorted(peaks, reverse=True)
    assert all(b.overhead >= a.overhead for a, b in pairwise(plans))
    assert plans[-1].overhead > 0
    for plan in plans[::2]:
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_budgets_of_ones_own_and_those_that_cannot_be_met() -> None:
    model, args, kwargs = graph_break_model()
    plans = planner.sweep(model, args, kwargs, budgets=["90%", "5%", "min"], time_limit=30)
    assert [p.target.budget_text for p in plans] == ["90%", "min"]
    with pytest.raises(planner.InfeasibleBudget):
        planner.sweep(model, args, kwargs, budgets=["5%"], time_limit=30)
    with pytest.raises(planner.BudgetError):
        planner.sweep(model, args, kwargs, budgets=["12 bananas"])


def test_a_budget_of_too_little_time_is_left_out_and_one_that_is_there_twice_is_as_good_twice() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    options: Any = {"recompute": ["aten.gelu"], "costs": "roofline", "time_limit": 3}
    x = torch.ones(64, 16)
    plans = planner.sweep(model, x, budgets=["min@0%", "100%"], **options)
    assert [p.target.budget_text for p in plans] == ["100%"]
    with pytest.raises(planner.BudgetError, match=r"min@0%: the fastest schedule .* allow at least that"):
        planner.sweep(model, x, budgets=["min@0%"], **options)
    first, second = planner.sweep(model, x, budgets=["90%", "90%"], **{**options, "recompute": ()})
    assert first.solver == second.solver
