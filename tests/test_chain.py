"""Blocks in a row: several recomputations, long chains, low budgets."""

import numpy as np
import pytest

from solvers import Graph, check, lower_sets, simulate, sqrt_n
from solvers import chain as chain_solver
from solvers.chain import choose_walls
from tests.graphs import chain, random_dag, transformer, unet

LONG = chain(1000)


def overhead(graph: Graph, seconds: float) -> float:
    return seconds / graph.base_seconds - 1


def test_a_thousand_steps_in_a_twentieth_of_the_memory() -> None:
    budget = simulate(LONG, LONG.base_schedule).peak_bytes // 20
    solutions = [solver.solve(LONG, budget) for solver in (sqrt_n, chain_solver)]
    for solution in solutions:
        check(LONG, solution.schedule)
    assert min(overhead(LONG, s.seconds) for s in solutions if s.feasible) <= 0.35


@pytest.mark.parametrize("fraction", [0.2, 0.1, 0.03])
def test_long_chains(fraction: float) -> None:
    budget = int(fraction * simulate(LONG, LONG.base_schedule).peak_bytes)
    solution = chain_solver.solve(LONG, budget)
    assert solution.feasible
    assert overhead(LONG, solution.seconds) <= 0.6
    check(LONG, solution.schedule)


@pytest.mark.parametrize("graph", [transformer(4), unet(4), random_dag(3, 80)])
def test_reaches_no_higher_than_lower_sets(graph: Graph) -> None:
    single = lower_sets.solve(graph, None)
    check(graph, single.schedule)
    several = chain_solver.solve(graph, None)
    check(graph, several.schedule)
    assert several.peak_bytes <= 1.1 * single.peak_bytes


def test_walls_are_balanced() -> None:
    weight = np.arange(101) * 10
    walls = choose_walls(weight, np.arange(1, 100), 10)
    assert len(walls) <= 9
    assert max(np.diff([0, *walls, 100])) <= 20
