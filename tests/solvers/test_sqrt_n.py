"""Chen's segments: what they promise on chains, transformers, U-Nets and random graphs."""

import gc
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Constraints, Graph, Status, check, simulate
from solvers.least import least
from solvers.model.incumbent import Search
from solvers.sqrt_n import _RECURSIVE, one_extra_forward, solve, splits
from tests.graphs import chain, graphs, random_dag, transformer, unet


@pytest.mark.heavy
@settings(deadline=None)
@given(graphs(), st.floats(0.1, 1.1))
def test_solutions_are_valid(graph: Graph, fraction: float) -> None:
    budget = int(fraction * simulate(graph, graph.base_schedule).peak_bytes)
    solution = solve(graph, budget)
    check(graph, solution.schedule)
    timeline = simulate(graph, solution.schedule)
    assert (timeline.peak_bytes, timeline.seconds) == (solution.peak_bytes, solution.seconds)
    if solution.feasible:
        assert solution.peak_bytes <= budget
    else:
        assert solution.status is Status.INFEASIBLE
        assert solution.peak_bytes > budget
        # Cuts follow the budget, so that the least is asked for as such: what `least` says can be had.
        lowest = least(solve, graph)
        check(graph, lowest.schedule)
        assert lowest.feasible
        assert lowest.peak_bytes == simulate(graph, lowest.schedule).peak_bytes


@settings(deadline=None)
@given(graphs())
def test_no_budget_means_least_peak_at_one_extra_forward(graph: Graph) -> None:
    solution = solve(graph, None)
    check(graph, solution.schedule)
    assert solution.feasible
    assert solution.peak_bytes <= simulate(graph, graph.base_schedule).peak_bytes
    assert solution.seconds <= graph.base_seconds + one_extra_forward(graph) + 1e-6


@settings(deadline=None)
@given(graphs(), st.integers(0, 2**20))
def test_constraints_are_honoured(graph: Graph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keep, recompute = rng.random((2, len(graph.values))) < 0.2
    recompute &= ~keep
    solution = solve(graph, None, constraints=Constraints(keep, recompute))
    rerun = graph.base_of[solution.schedule[graph.forward_length :]]
    rerun = rerun[rerun < graph.forward_length]
    needed = {
        v
        for op in graph.ops[graph.forward_length : graph.base_length]
        for v in op.inputs
        if recompute[v] and graph.recompute_row[v] >= 0 and op.region == graph.ops[graph.producer[v]].region
    }
    assert needed <= {v for i in rerun.tolist() for v in graph.ops[graph.rerun(i)].outputs}


@pytest.mark.heavy
def test_chain_grows_as_the_square_root() -> None:
    peaks = [solve(chain(n, 1), None).peak_bytes for n in (100, 400, 1600)]
    assert peaks[0] <= 2.5 * math.sqrt(100) + 3
    assert peaks[2] <= 2.5 * math.sqrt(1600) + 3
    assert peaks[1] / peaks[0] == pytest.approx(2, abs=0.4)


@pytest.mark.heavy
def test_recursive_form_grows_as_the_logarithm() -> None:
    # Without a time limit nothing depends on the machine.
    least = [solve(chain(n, 1), 1).peak_bytes for n in (400, 1200, 3600)]
    assert least == [10, 11, 13]
    assert all(peak <= 1.2 * math.log2(n) for peak, n in zip(least, (400, 1200, 3600), strict=True))


@pytest.mark.heavy
def test_budget_below_one_recomputation_is_met_by_the_recursive_form() -> None:
    graph = chain(1000, 1)
    single = solve(graph, None).peak_bytes
    solution = solve(graph, single // 2)
    assert solution.feasible
    check(graph, solution.schedule)


@pytest.mark.parametrize("graph", [unet(4), transformer(4), random_dag(5, 200, reach=20)])
def test_graphs_with_few_articulation_points(graph: Graph) -> None:
    baseline = simulate(graph, graph.base_schedule).peak_bytes
    assert solve(graph, None).peak_bytes < 0.8 * baseline


def test_enough_budget_recomputes_nothing() -> None:
    graph = transformer(3)
    baseline = simulate(graph, graph.base_schedule)
    solution = solve(graph, baseline.peak_bytes)
    assert solution.seconds == baseline.seconds


def test_more_budget_is_not_slower() -> None:
    graph = transformer(6)
    peak = simulate(graph, graph.base_schedule).peak_bytes
    answers = [solve(graph, int(peak * f)) for f in np.linspace(0.2, 1, 20)]
    seconds = [a.seconds for a in answers if a.feasible]
    assert len(seconds) > 10
    assert seconds[-1] == graph.base_seconds


@pytest.mark.heavy
@settings(deadline=None, max_examples=20)
@given(graphs(), st.lists(st.floats(0.1, 1.0), min_size=2, max_size=4))
def test_what_an_earlier_search_found_changes_no_answer(graph: Graph, fractions: list[float]) -> None:
    unplanned = simulate(graph, graph.base_schedule).peak_bytes
    for budget in (0, *(int(share * unplanned) for share in fractions)):
        again, alone = solve(graph, budget), solve(replace(graph), budget)  # which knows of no other budget
        assert (again.status, again.peak_bytes) == (alone.status, alone.peak_bytes)
        assert np.array_equal(again.schedule, alone.schedule)


def test_recursive_schedules_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tried = chain(40), list[int]()
    judge = Search.try_kept
    monkeypatch.setattr(Search, "try_kept", lambda *args: (tried.append(1), judge(*args))[1])
    solve(graph, 0)
    first = len(tried)
    solve(graph, 0)
    assert len(tried) - first < first / 2


def test_what_a_search_keeps_goes_with_its_graph() -> None:
    graph = chain(40)
    solve(graph, 0)
    key = id(graph)
    assert key in _RECURSIVE
    del graph
    gc.collect()
    assert key not in _RECURSIVE


def test_splits_end_at_the_last_segment() -> None:
    assert splits(0, 8, 2) == [5, 7, 8]
    assert splits(3, 3, 2) == []
    assert splits(0, 1, 8) == [1]


def test_time_limit_still_gives_an_answer() -> None:
    assert solve(random_dag(7, 2000), None, time_limit=0.0).feasible
