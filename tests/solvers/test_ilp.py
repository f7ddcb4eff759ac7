"""The single-recompute program and the portfolio on the shapes of real models."""

import numpy as np
import pytest

from solvers import Graph, check, portfolio, simulate, sqrt_n
from solvers.programs import ilp
from solvers.programs.lower_bound import lower_bound
from tests.graphs import chain, random_dag, transformer, unet

pytestmark = [pytest.mark.usefixtures("no_hurry"), pytest.mark.heavy]

GRAPHS = {"transformer": transformer(4), "unet": unet(4), "chain": chain(40), "dag": random_dag(11, 60)}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("fraction", [0.8, 0.6])
def test_never_slower_than_sqrt_n_and_never_below_the_bound(name: str, fraction: float) -> None:
    graph = GRAPHS[name]
    budget = int(fraction * simulate(graph, graph.base_schedule).peak_bytes)
    chen = sqrt_n.solve(graph, budget)
    for solution in (ilp.solve(graph, budget, time_limit=10), portfolio.solve(graph, budget, time_limit=10)):
        check(graph, solution.schedule)
        assert solution.feasible or not chen.feasible
        if solution.feasible:
            assert solution.seconds <= chen.seconds + 1e-9
            assert lower_bound(graph, budget).seconds <= solution.seconds + 1e-6


def test_tight_intervals_beat_segments_by_far_on_a_transformer() -> None:
    graph = transformer(6)
    budget = int(0.6 * simulate(graph, graph.base_schedule).peak_bytes)
    chen = sqrt_n.solve(graph, budget).seconds - graph.base_seconds
    assert ilp.solve(graph, budget, time_limit=20).seconds - graph.base_seconds <= 0.9 * chen


def test_walls_bound_the_program_of_a_long_graph() -> None:
    programs = ilp.Programs(transformer(40))
    assert programs.sizes() == sorted(programs.sizes())
    assert len(programs.walls(2_000)) > len(programs.walls(8_000))
    assert programs.program(2_000) is programs.program(2_000)


def assert_monotone(graph: Graph, budgets: list[int]) -> None:
    solutions = portfolio.sweep(graph, budgets, time_limit=10)
    for budget, solution in zip(budgets, solutions, strict=True):
        assert solution.feasible == (solution.peak_bytes <= budget)
    feasible = [s.seconds for s in solutions if s.feasible]
    assert feasible == sorted(feasible, reverse=True)
    assert feasible


@pytest.mark.parametrize("graph", [random_dag(2, 25)])
def test_sweeps_are_monotone(graph: Graph) -> None:
    peak = simulate(graph, graph.base_schedule).peak_bytes
    assert_monotone(graph, [int(f * peak) for f in np.linspace(0.3, 1.0, 4)])


def test_sweeps_answer_in_the_order_asked() -> None:
    graph = transformer(2)
    peak = simulate(graph, graph.base_schedule).peak_bytes
    high, low = portfolio.sweep(graph, [peak, int(0.7 * peak)], time_limit=5)
    assert high.seconds == graph.base_seconds
    assert low.seconds > high.seconds


def test_known_schedules_are_candidates() -> None:
    graph = transformer(2)
    budget = int(0.6 * simulate(graph, graph.base_schedule).peak_bytes)
    good = portfolio.solve(graph, budget, time_limit=5)
    again = portfolio.solve(graph, budget, time_limit=0.0, known=[good.schedule])
    assert again.seconds <= good.seconds


def test_a_budget_proven_infeasible_is_not_searched_for_long() -> None:
    graph = transformer(1)
    solution = portfolio.solve(graph, 1, time_limit=20)
    assert not solution.feasible
    assert solution.peak_bytes > 1
    assert np.isinf(lower_bound(graph, 1).seconds)
