"""Local improvement by simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Graph, Op, Phase, Value, check, recompute, simulate
from solvers.local.exchange import exchange
from solvers.local.polish import delay, is_rerun, polish, prune
from solvers.model.constraints import Constraints
from solvers.model.incumbent import Search
from solvers.model.schedule import lifetimes
from solvers.programs import ilp
from tests.graphs import chain, graphs, random_dag

pytestmark = pytest.mark.usefixtures("no_hurry")


@settings(deadline=None)
@given(graphs(), st.integers(0, 2**20), st.floats(1.0, 1.5))
def test_polish_keeps_the_budget_and_is_never_slower(graph: Graph, seed: int, slack: float) -> None:
    kept = np.random.default_rng(seed).random(len(graph.values)) < 0.5
    schedule = recompute(graph, kept)
    budget = int(slack * simulate(graph, schedule).peak_bytes)
    search = Search("test", graph, budget)
    before = search.try_schedule(schedule)
    after = polish(search, before, budget)
    check(graph, after.schedule)
    assert after.seconds <= before.seconds
    assert after.peak_bytes <= budget


@settings(deadline=None)
@given(graphs(), st.integers(0, 2**20))
def test_delayed_schedules_are_valid(graph: Graph, seed: int) -> None:
    kept = np.random.default_rng(seed).random(len(graph.values)) < 0.5
    search = Search("test", graph, None)
    candidate = delay(search, search.try_kept(kept))
    check(graph, candidate.schedule)


def test_all_memory_means_no_recomputation() -> None:
    graph = chain(30)
    peak = simulate(graph, graph.base_schedule).peak_bytes
    search = Search("test", graph, peak)
    candidate = search.try_kept(np.zeros(len(graph.values), dtype=bool))
    assert polish(search, candidate, peak).seconds == graph.base_seconds


def test_useless_reruns_are_pruned() -> None:
    graph = chain(4)
    schedule = np.array([0, 1, 2, 3, 2, 3, 4, 5, 6])
    assert is_rerun(graph, schedule).sum() == 2
    pruned = prune(graph, schedule)
    assert pruned.tolist() == [0, 1, 2, 3, 2, 4, 5, 6]
    check(graph, pruned)


@settings(deadline=None, max_examples=50)
@given(graphs(), st.integers(0, 2**20), st.floats(1.0, 1.3))
def test_exchange_keeps_the_budget_and_is_never_slower(graph: Graph, seed: int, slack: float) -> None:
    kept = np.random.default_rng(seed).random(len(graph.values)) < 0.7
    schedule = recompute(graph, kept)
    budget = int(slack * simulate(graph, schedule).peak_bytes)
    search = Search("test", graph, budget, 5)
    before = search.try_schedule(schedule)
    after = exchange(search, before, budget)
    check(graph, after.schedule)
    assert after.seconds <= before.seconds
    assert after.peak_bytes <= budget


def test_exchange_evicts_what_is_idle_to_spare_what_is_dear() -> None:
    graph = random_dag(0, 30, plain=True)
    budget = int(0.45 * simulate(graph, graph.base_schedule).peak_bytes)
    search = Search("test", graph, budget)
    before = search.try_schedule(ilp.solve(graph, budget).schedule)
    after = exchange(search, before, budget)
    assert after.peak_bytes <= budget
    assert after.seconds < 0.98 * before.seconds


def test_exchange_holds_on_to_nothing_that_is_to_be_made_again() -> None:
    """The large result would be made again of the small one, if that lived on from the forward."""
    backward = Phase.BACKWARD
    ops = [
        *(Op((), (0,), 100.0), Op((), (1,), 10.0), Op((1,), (2,), 1.0)),
        Op((0, 2), (3,), 1.0, recomputable=False),
        *(Op((3,), (4,), 1.0, 50, phase=backward), Op((2, 4), (), 1.0, phase=backward)),
        Op((0, 4), (), 1.0, phase=backward),
    ]
    graph = Graph(tuple(ops), tuple(Value(size, f"v{v}") for v, size in enumerate((100, 10, 100, 100, 1))))
    again = np.array([False, True, False, False, False])
    search = Search("test", graph, 320, constraints=Constraints(recompute=again))
    before = search.try_schedule(recompute(graph, np.array([False, False, True, True, True])))
    after = exchange(search, before, 320)
    assert after.seconds < before.seconds
    lives = lifetimes(graph, after.schedule)
    of_forward = again[lives.value] & (lives.start < graph.forward_length)
    assert of_forward.any()
    assert (lives.end[of_forward] < graph.forward_length).all()
