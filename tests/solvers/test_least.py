""" "min" is the least that can be reached, and "min@33%" the least at that much extra time, everywhere."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.errors import BudgetError, InfeasibleBudget
from planner.planfile.budget import Budget, parse_budget
from solvers import portfolio, sqrt_n
from solvers.least import floor_bytes, least
from solvers.model.graph import Graph
from solvers.model.schedule import check, simulate
from tests.graphs import chain, graphs
from tests.small import graph_break_model
from tests.zoo import Built

pytestmark = pytest.mark.usefixtures("no_hurry")


def layers() -> Built:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6)))
    return model, (torch.randn(64, 32),), {}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("build", "solver"),
    [
        (layers, "auto"),
        pytest.param(graph_break_model, "auto", marks=pytest.mark.heavy),
        pytest.param(layers, "sqrt_n", marks=pytest.mark.heavy),
    ],
)
def test_min_takes_what_the_error_says_and_no_less_is_planned(build: object, solver: str) -> None:
    model, args, kwargs = build()  # type: ignore[operator]
    options = {"solver": solver, "time_limit": 60}
    plan = planner.plan(model, args, kwargs, budget="min", **options)
    assert plan.whole_step is not None
    total = plan.whole_step.total_bytes
    for budget in (1, total - 1):
        with pytest.raises(InfeasibleBudget) as error:
            planner.plan(model, args, kwargs, budget=budget, **options)
        assert error.value.minimum_bytes == total
    again = planner.plan(model, args, kwargs, budget=total, **options)
    assert again.predicted.peak_bytes == plan.predicted.peak_bytes


@pytest.mark.heavy
def test_a_sweep_ends_at_the_least() -> None:
    model, args, kwargs = layers()
    least_plan = planner.plan(model, args, kwargs, budget="min", time_limit=60)
    every = planner.sweep(model, args, kwargs, points=2, time_limit=240)
    named = planner.sweep(model, args, kwargs, budgets=["1%", "min", "min@10%"], time_limit=180)
    assert every[-1].predicted.peak_bytes == least_plan.predicted.peak_bytes
    assert [p.target.budget_text for p in named] == ["min@10%", "min"]
    assert named[-1].predicted.peak_bytes == least_plan.predicted.peak_bytes
    assert named[0].overhead <= 0.1


@settings(deadline=None, max_examples=8)
@given(graphs(most=14))
@pytest.mark.heavy
def test_nothing_is_below_the_least(graph: Graph) -> None:
    lowest = portfolio.solve(graph, None, time_limit=20)
    check(graph, lowest.schedule)
    assert floor_bytes(graph) <= lowest.peak_bytes == simulate(graph, lowest.schedule).peak_bytes
    for budget in (0, lowest.peak_bytes - 1):
        refused = portfolio.solve(graph, budget, time_limit=20)
        assert not refused.feasible
        assert refused.peak_bytes == lowest.peak_bytes
    assert portfolio.solve(graph, lowest.peak_bytes, time_limit=20).feasible


@settings(deadline=None, max_examples=8)
@given(graphs(most=14), st.floats(0.0, 1.0), st.sampled_from(["auto", "sqrt_n"]))
def test_the_least_within_a_time_takes_no_longer(graph: Graph, share: float, solver: str) -> None:
    most = graph.base_seconds * (1 + share)
    if solver == "auto":
        found = portfolio.solve(graph, None, time_limit=1, most_seconds=most)
    else:
        found = least(sqrt_n.solve, graph, time_limit=1, most_seconds=most)
    check(graph, found.schedule)
    assert found.feasible
    assert found.seconds <= most * (1 + 1e-9)
    assert found.peak_bytes <= simulate(graph, graph.base_schedule).peak_bytes


def test_a_chain_needs_no_more_than_its_largest_operation() -> None:
    graph = chain(40, 100)
    assert portfolio.solve(graph, None, time_limit=2).peak_bytes == floor_bytes(graph) == 300


@pytest.mark.parametrize("text", ["min@33%", " MIN @ 33 %"])
def test_the_least_at_some_extra_time_is_a_budget(text: str) -> None:
    budget = parse_budget(text, 1000)
    assert budget == Budget(bytes=None, text="min@33%", max_overhead=0.33)


@pytest.mark.parametrize(
    ("text", "words"),
    [("min@0.33", 'written "min@33%"'), ("min@-5%", "cannot be understood"), ("min@", "min@33%")],
)
def test_the_least_at_no_time_that_can_be_read(text: str, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        parse_budget(text, 1000)


def test_less_time_than_what_must_be_recomputed_takes() -> None:
    model, args, kwargs = layers()
    with pytest.raises(BudgetError, match=r"min@0%: the fastest schedule that solver auto finds takes \d+"):
        planner.plan(model, args, kwargs, budget="min@0%", recompute=["aten.*"], time_limit=1)


@pytest.mark.heavy
def test_the_plan_says_what_was_asked_for_and_plans_again_by_it() -> None:
    model, args, kwargs = layers()
    plan = planner.plan(model, args, kwargs, budget="min@20%", time_limit=1)
    assert plan.target.budget_text == "min@20%"
    assert plan.target.budget_bytes is None
    assert plan.overhead <= 0.2
    plan.apply(model, on_new_shape="replan")
    model(torch.randn(96, 32)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
