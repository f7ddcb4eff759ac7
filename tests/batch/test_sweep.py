"""Plans for many budgets."""

from itertools import pairwise

import pytest

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
