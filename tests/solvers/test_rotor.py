"""Blocks in a row: several recomputations, long chains, low budgets."""

from dataclasses import replace

import numpy as np
import pytest

from solvers import Graph, check, simulate, sqrt_n
from solvers.chains import lower_sets
from solvers.chains import rotor as chain_solver
from solvers.chains.blocks import find_blocks
from solvers.chains.rotor import choose_walls, distinct_slots, fill, judge, plan
from solvers.model.constraints import NO_CONSTRAINTS
from solvers.model.cut_points import find_cuts, forward_uses, pinned_values
from solvers.model.incumbent import Search
from solvers.sqrt_n import families, weights
from tests.graphs import chain, random_dag, transformer, unet

LONG = chain(1000)


def overhead(graph: Graph, seconds: float) -> float:
    return seconds / graph.base_seconds - 1


@pytest.mark.heavy
def test_a_thousand_steps_in_a_twentieth_of_the_memory() -> None:
    budget = simulate(LONG, LONG.base_schedule).peak_bytes // 20
    solutions = [solver.solve(LONG, budget) for solver in (sqrt_n, chain_solver)]
    for solution in solutions:
        check(LONG, solution.schedule)
    assert min(overhead(LONG, s.seconds) for s in solutions if s.feasible) <= 0.35


@pytest.mark.heavy
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


def test_plans_take_the_seconds_that_their_table_promises() -> None:
    graph = chain(200)
    uses = forward_uses(graph)
    pinned = pinned_values(graph, uses)
    cuts = find_cuts(graph, uses, pinned)
    walls = choose_walls(weights(graph, (uses.last_backward >= 0) & ~pinned), families(cuts)[0], 10)
    blocks = find_blocks(graph, uses, cuts, pinned, NO_CONSTRAINTS, walls)
    dear = blocks.option_bytes.copy()
    dear[-1] *= 100  # an option that fits in none of the tables
    everything = simulate(graph, graph.base_schedule).peak_bytes
    for blocks_ in (blocks, replace(blocks, option_bytes=dear)):
        more = []
        for share in (1.0, 0.3, 0.12):
            table = fill(blocks_, int(share * everything))
            for slots in distinct_slots(table.seconds[0, -1]).tolist():
                retained = plan(blocks_, cuts, table, slots)
                assert retained is not None
                made = judge(Search("chain", graph, None), blocks_, cuts, pinned, retained)
                check(graph, made.schedule)
                more.append(made.seconds - table.seconds[0, -1, slots])
        assert len(more) > 20
        assert np.ptp(more) <= 1e-9 * graph.base_seconds
