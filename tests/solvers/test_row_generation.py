"""The program with memory rows only where they bind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Constraints, Graph, check, portfolio, simulate
from solvers.chains import rotor
from solvers.model.cut_points import forward_uses
from solvers.model.incumbent import Search
from solvers.programs import exact_ilp, row_generation
from solvers.programs.lower_bound import lower_bound
from tests.graphs import graphs, random_dag, transformer

pytestmark = pytest.mark.usefixtures("no_hurry")


def search_for(graph: Graph, budget: int, constraints: Constraints | None = None) -> Search:
    search = Search("test", graph, budget, 60.0, constraints=constraints or Constraints())
    search.try_kept(np.ones(len(graph.values), dtype=bool))
    return search


def share(graph: Graph, fraction: float) -> int:
    return int(fraction * simulate(graph, graph.base_schedule).peak_bytes)


@pytest.mark.parametrize("fraction", [0.9, 0.7, 0.5])
def test_a_transformer_is_solved_to_the_lower_bound(fraction: float) -> None:
    graph = transformer(6)
    budget = share(graph, fraction)
    search = search_for(graph, budget)
    assert row_generation.improve(search, budget, seconds=5.0)
    assert search.fastest is not None
    check(graph, search.fastest.schedule)
    bound = lower_bound(graph, budget).seconds
    assert bound <= search.fastest.seconds <= bound + 0.001 * graph.base_seconds


def test_rows_are_added_where_simulation_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_dag(2, 80, reach=8)
    budget = share(graph, 0.6)
    lazy = row_generation.LazyRows(graph)
    rows: list[int] = []
    program = lazy.program

    def watched(moments: tuple[int, ...], reach: float, small: bool = False) -> object:
        rows.append(len(moments))
        return program(moments, reach, small)

    monkeypatch.setattr(lazy, "program", watched)
    search = search_for(graph, budget)
    row_generation.improve(search, budget, lazy)
    assert search.fastest is not None
    assert search.fastest.peak_bytes <= budget
    assert rows[0] == 1
    assert rows[-1] > 1


@settings(deadline=None, max_examples=12)
@given(graphs(most=8), st.floats(0.2, 0.95))
def test_answers_are_valid_and_not_below_the_optimum(graph: Graph, fraction: float) -> None:
    budget = share(graph, fraction)
    search = search_for(graph, budget)
    row_generation.improve(search, budget)
    if search.fastest is None:
        return
    check(graph, search.fastest.schedule)
    assert search.fastest.peak_bytes <= budget
    exact = exact_ilp.solve(graph, budget, time_limit=2)
    if exact.feasible and exact.solve_seconds < 1.5:
        assert search.fastest.seconds >= exact.seconds - 1e-6


def test_small_values_are_decided_about_in_the_end() -> None:
    graph = transformer(4)
    lazy = row_generation.LazyRows(graph)
    assert lazy.pinned.sum() > lazy.kept(small=True).sum()
    coarse, fine = (lazy.program(lazy.first, 1.0, small) for small in (False, True))
    assert (fine.keep >= 0).sum() > (coarse.keep >= 0).sum()


def test_a_row_counts_what_is_alive_at_its_moment() -> None:
    graph = random_dag(3, 60)
    moments = tuple(range(graph.forward_length, graph.base_length, 7))
    lazy = row_generation.LazyRows(graph)
    model = lazy.program(moments, float(graph.forward_length))
    everything = np.zeros(len(model.program.cost))
    everything[model.keep[model.keep >= 0]] = 1.0
    alive = simulate(graph, graph.base_schedule).step_bytes[list(moments)]
    # What is kept may be held for re-runs: never less than what the captured order holds.
    assert (model.use(everything) >= alive - model.unit * 1e-6).all()


def test_kept_and_recomputed_by_the_user_stay_so() -> None:
    graph = transformer(6)
    budget = share(graph, 0.6)
    again = np.zeros(len(graph.values), dtype=bool)
    again[np.flatnonzero(graph.recompute_row >= 0)[10:30]] = True
    search = search_for(graph, budget, Constraints(recompute=again))
    row_generation.improve(search, budget)
    assert search.fastest is not None
    rows = search.fastest.schedule[graph.forward_length :].tolist()
    ran = {v for row in rows for v in graph.ops[row].outputs}
    needed = {v for v in np.flatnonzero(again).tolist() if forward_uses(graph).last_backward[v] >= 0}
    assert needed <= ran


@pytest.mark.heavy
def test_auto_is_not_worse_than_the_chain_at_the_least_peak_of_the_chain() -> None:
    graph = transformer(2)
    least = rotor.solve(graph, None)
    solution = portfolio.solve(graph, least.peak_bytes, effort="fast")
    assert solution.feasible
    assert solution.seconds <= least.seconds * (1 + 1e-9)
