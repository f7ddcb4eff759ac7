"""Local improvement by simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Graph, check, recompute, simulate
from solvers.local.exchange import exchange
from solvers.local.polish import delay, is_rerun, polish, prune
from solvers.model.incumbent import Search
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
