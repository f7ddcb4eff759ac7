"""The portfolio: progress reports, time limits, large graphs."""

import time
from dataclasses import replace

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Graph, check, milp, portfolio, simulate
from solvers.chains import lower_sets
from solvers.effort import EFFORTS
from solvers.model.incumbent import Search
from solvers.programs import exact_ilp, ilp, neighbourhood, row_generation
from solvers.registry import SOLVERS
from tests.graphs import graphs, random_dag, transformer

pytestmark = [pytest.mark.usefixtures("no_hurry"), pytest.mark.heavy]


def test_progress_only_advances() -> None:
    graph = transformer(3)
    reported: list[float] = []
    budget = int(0.5 * simulate(graph, graph.base_schedule).peak_bytes)
    portfolio.solve(graph, budget, effort="fast", progress=lambda _, done: reported.append(done))
    assert reported == sorted(reported)
    assert reported[-1] == 1.0


def test_a_large_random_graph_has_an_answer_within_its_time() -> None:
    graph = random_dag(1, 2000)
    budget = int(0.6 * simulate(graph, graph.base_schedule).peak_bytes)
    begin = time.process_time()
    solution = portfolio.solve(graph, budget, time_limit=0.5)
    assert time.process_time() - begin < 30  # what others do on the machine does not count
    assert solution.feasible
    check(graph, solution.schedule)


@settings(deadline=None, max_examples=10)
@given(graphs(most=20), st.floats(0.1, 0.9))
def test_the_least_peak_reported_can_be_had(graph: Graph, fraction: float) -> None:
    budget = int(fraction * simulate(graph, graph.base_schedule).peak_bytes)
    solution = portfolio.solve(graph, budget, time_limit=5)
    if not solution.feasible:
        assert solution.peak_bytes > budget
        assert portfolio.solve(graph, solution.peak_bytes, time_limit=5).feasible


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("solver", ["auto", "ilp", "chain"])
def test_without_any_integer_solver_an_answer_is_still_found(
    solver: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", "no-such-program")
    milp._warn_of_no_solver.cache_clear()
    graph = transformer(3)
    budget = int(0.6 * simulate(graph, graph.base_schedule).peak_bytes)
    solution = SOLVERS[solver](graph, budget, time_limit=5)
    assert solution.feasible
    check(graph, solution.schedule)
    assert simulate(graph, solution.schedule).peak_bytes <= budget
    assert "pip install highspy" in caplog.text


@pytest.mark.parametrize("solver", ["auto", "ilp", "chain", "lower_sets", "exact"])
def test_no_time_at_all_gives_a_typed_answer(solver: str) -> None:
    graph = transformer(3)
    budget = int(0.6 * simulate(graph, graph.base_schedule).peak_bytes)
    solution = SOLVERS[solver](graph, budget, time_limit=0.0)
    check(graph, solution.schedule)
    assert solution.feasible == (simulate(graph, solution.schedule).peak_bytes <= budget)
    if solution.bound_seconds is not None and solution.feasible:
        assert solution.bound_seconds <= solution.seconds


def test_a_stage_that_takes_too_long_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(search: Search, *_: object, **__: object) -> bool:
        search.stage_end = search.elapsed - 1
        return False

    graph = transformer(2)
    budget = simulate(graph, graph.base_schedule).peak_bytes // 2
    found = portfolio.solve(graph, budget, effort="fast")
    monkeypatch.setattr(row_generation, "improve", slow)
    monkeypatch.setattr(lower_sets, "improve", lambda *_: None)
    again = portfolio.solve(graph, budget, effort="fast")
    assert again.feasible
    assert again.seconds <= 1.05 * found.seconds


@pytest.mark.parametrize("share", [None, 0.5, 0.7])
def test_what_is_found_fast_is_hardly_worse(share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the best but for the search part by part, which is what the best takes its time for."""
    monkeypatch.setattr(neighbourhood, "improve", lambda search, **_: None)
    graph = transformer(2)
    budget = None if share is None else int(share * simulate(graph, graph.base_schedule).peak_bytes)
    fast, best = (portfolio.solve(graph, budget, effort=effort) for effort in ("fast", "best"))
    assert fast.feasible
    assert best.feasible
    assert fast.peak_bytes <= (best.peak_bytes if budget is None else budget)
    assert best.seconds <= fast.seconds <= best.seconds + 0.005 * graph.base_seconds


def test_the_exact_program_gets_a_second_where_answers_are_to_be_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    monkeypatch.setattr(Search, "wall", lambda _, seconds: seconds)
    monkeypatch.setattr(neighbourhood, "improve", lambda search, **_: None)
    monkeypatch.setattr(exact_ilp, "answer", lambda search, slots, budget, *, seconds: given.append(seconds))
    graph = transformer(1)
    for effort, most in (("fast", 1.0), ("best", float("inf"))):
        given.clear()
        portfolio.solve(graph, None, effort=effort)
        assert given
        assert max(given) == pytest.approx(most, abs=0.1)


def test_what_is_far_behind_another_form_is_not_given_the_slow_solvers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: list[str] = []
    monkeypatch.setattr(ilp, "improve", lambda *_, **__: slow.append("programs"))
    monkeypatch.setattr(neighbourhood, "improve", lambda *_, **__: slow.append("parts"))
    graph = transformer(4)
    budget = int(0.4 * simulate(graph, graph.base_schedule).peak_bytes)
    alone = portfolio.solve(graph, budget, effort="fast")
    assert alone.feasible
    assert slow == ["programs", "parts"]
    hopeless = EFFORTS["fast"].hopeless * graph.base_seconds
    for rival, expected in ((alone.seconds - 1.1 * hopeless, []), (alone.seconds, ["programs", "parts"])):
        slow.clear()
        found = portfolio.solve(graph, budget, effort="fast", rival=rival)
        assert (found.seconds, slow) == (alone.seconds, expected)
    slow.clear()
    portfolio.solve(graph, budget, effort="best", rival=0.0)
    assert slow == ["programs", "parts"]


def test_a_budget_that_is_nearly_met_is_tried_with_the_best_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_dag(5, 22)
    least = portfolio.solve(graph, None, effort="best").peak_bytes
    solution = portfolio.solve(graph, least, effort="fast")
    assert solution.feasible
    assert solution.peak_bytes == simulate(graph, solution.schedule).peak_bytes <= least
    monkeypatch.setitem(EFFORTS, "fast", replace(EFFORTS["fast"], nearly_fits=0.0))
    assert not portfolio.solve(graph, least, effort="fast").feasible
