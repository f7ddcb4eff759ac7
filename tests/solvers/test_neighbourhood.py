"""Large neighbourhood search: parts of a schedule found anew."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import SOLVERS, Graph, check, milp, portfolio, simulate
from solvers.effort import EFFORTS, Effort
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import GLUE_REGION
from solvers.model.in_flight import InFlight
from solvers.model.incumbent import Search
from solvers.model.indices import BaseOp
from solvers.programs import exact_ilp, neighbourhood
from solvers.programs.slots import VARIABLES_AN_ITERATION, best_runs
from tests.graphs import chain, graphs, random_dag

pytestmark = [pytest.mark.usefixtures("no_hurry"), pytest.mark.heavy]


def searching(graph: Graph, budget: int, solver: str, constraints: Constraints = NO_CONSTRAINTS) -> Search:
    """A search that has a solver's schedule."""
    search = Search("parts", graph, budget, None, None, constraints)
    search.try_schedule(SOLVERS[solver](graph, budget, constraints=constraints).schedule)
    return search


def budget_of(graph: Graph, share: float) -> int:
    return int(share * simulate(graph, graph.base_schedule).peak_bytes)


@settings(max_examples=60, deadline=None)
@given(graphs(most=16, regions=3), st.sampled_from([0.4, 0.6, 0.8]), st.sampled_from(["sqrt_n", "min"]))
def test_no_slot_holds_less_than_the_step_does(graph: Graph, share: float, start: str) -> None:
    """What the program takes for possible is within the budget, and what is within it is possible."""
    budget = budget_of(graph, share)
    schedule = SOLVERS["sqrt_n"](graph, None if start == "min" else budget).schedule
    for part in neighbourhood.find_parts(graph):
        slots, used = neighbourhood.find_slots(graph, schedule, part)
        runs = [slot for slot, there in zip(slots, used, strict=True) if there]
        rows = [row for slot in runs for row in slot.merged or (slot.row,)]
        peak = simulate(graph, np.array(rows)).peak_bytes
        values = sorted(neighbourhood._values_of(graph, part))
        for allowed in {peak, max(budget, peak - 1)}:
            found = best_runs(graph, slots, allowed, NO_CONSTRAINTS, values=values)
            if allowed >= peak:
                assert found.schedule is not None
            if found.schedule is not None:
                check(graph, found.schedule)
                assert simulate(graph, found.schedule).peak_bytes <= allowed
                if allowed >= peak:
                    assert (
                        simulate(graph, found.schedule).seconds
                        <= simulate(graph, np.array(rows)).seconds + 1e-9
                    )


@pytest.mark.parametrize("seed", range(6))
def test_a_whole_graph_in_one_part_is_solved_exactly(seed: int) -> None:
    graph = chain(4, 10 + seed) if seed < 2 else random_dag(seed, 4, plain=True)
    for share in (0.7, 0.9):
        budget = budget_of(graph, share)
        exact = exact_ilp.solve(graph, budget)
        search = searching(graph, budget, "sqrt_n")
        if search.fastest is None:
            continue
        neighbourhood.improve(search, work=1_000_000, nodes=1_000)
        assert search.fastest.seconds == pytest.approx(exact.seconds, rel=2 * neighbourhood.GAP)


def layers(count: int) -> Graph:
    """A chain whose operations are in captured graphs of eight each."""
    graph = chain(8 * count, 100)

    def region(i: int) -> int:
        at = i if i < graph.forward_length else graph.base_length - 1 - i
        return min(max(at, 0) // 8, count - 1)

    ops = [replace(op, region=region(i)) for i, op in enumerate(graph.ops)]
    return Graph(ops, graph.values)


def test_what_is_found_for_a_layer_is_tried_for_those_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(4)
    budget = budget_of(graph, 0.5)
    search = searching(graph, budget, "sqrt_n")
    assert search.fastest is not None
    before = search.fastest.seconds
    parts = neighbourhood.find_parts(graph)
    assert len({str(neighbourhood._signature(search, part)) for part in parts}) < len(parts)
    improved: list[int] = []
    improve_part = neighbourhood.improve_part

    def counted(search: Search, part: list[BaseOp], *, nodes: int) -> int:
        improved.append(part[0])
        return improve_part(search, part, nodes=nodes)

    monkeypatch.setattr(neighbourhood, "improve_part", counted)
    neighbourhood.improve(search, work=1_000_000, nodes=1_000)
    assert search.fastest.seconds < before
    assert search.fastest.peak_bytes <= budget
    assert improved[:2] == [parts[-1][0], parts[-2][0]]


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_asked_for_is_kept_or_not(kept: bool) -> None:
    graph = layers(3)

    def improved(constraints: Constraints) -> set[int]:
        """What runs again."""
        search = searching(graph, budget_of(graph, 0.6), "sqrt_n", constraints)
        neighbourhood.improve(search, work=1_000_000, nodes=1_000)
        assert search.fastest is not None
        return set(search.fastest.schedule[graph.forward_length :].tolist())

    free = improved(NO_CONSTRAINTS)
    op = next(i for i in range(8, graph.forward_length) if (i in free) is kept)
    chosen = np.zeros(len(graph.values), dtype=bool)
    chosen[list(graph.ops[op].outputs)] = True
    assert (op in improved(Constraints(keep=chosen) if kept else Constraints(recompute=chosen))) is not kept


def test_a_layer_that_is_not_free_is_not_like_others() -> None:
    """What is overwritten before the backward must be computed again, whatever the others do."""
    graph = layers(4)
    again = np.zeros(len(graph.values), dtype=bool)
    again[list(graph.ops[13].outputs)] = True
    search = searching(graph, budget_of(graph, 0.5), "sqrt_n", Constraints(recompute=again))
    parts = neighbourhood.find_parts(graph)
    assert [neighbourhood._signature(search, part) is None for part in parts] == [False, True, False, False]
    neighbourhood.improve(search, work=1_000_000, nodes=1_000)
    assert search.fastest is not None
    assert 13 in search.fastest.schedule[graph.forward_length :]


def test_no_work_no_search() -> None:
    graph = layers(3)
    search = searching(graph, budget_of(graph, 0.6), "sqrt_n")
    before = search.fastest
    neighbourhood.improve(search, work=0, nodes=1_000)
    assert search.fastest is before


def test_no_part_is_begun_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(3)
    took: list[int] = []
    improve_part = neighbourhood.improve_part

    def counted(search: Search, part: list[BaseOp], *, nodes: int) -> int:
        took.append(improve_part(search, part, nodes=nodes))
        return took[-1]

    monkeypatch.setattr(neighbourhood, "improve_part", counted)
    for work in (1, 1_000_000):
        took.clear()
        neighbourhood.improve(searching(graph, budget_of(graph, 0.6), "sqrt_n"), work=work, nodes=1_000)
        assert (sum(each > 0 for each in took) == 1) is (work == 1)


def test_a_part_of_which_nothing_runs_again_takes_no_work() -> None:
    graph = layers(3)
    search = searching(graph, budget_of(graph, 1.0), "none")
    part = neighbourhood.find_parts(graph)[0]
    assert neighbourhood.improve_part(search, part, nodes=1_000) == 0


@pytest.mark.parametrize("said", [None, 0, 7_000])
def test_work_is_iterations_or_a_guess_where_the_solver_tells_none(
    said: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, sizes = layers(2), []
    solve = milp.Program.solve

    def told(program: milp.Program, **options: Any) -> milp.Answer:
        sizes.append(len(program.cost))
        return replace(solve(program, **options), iterations=said)

    monkeypatch.setattr(milp.Program, "solve", told)
    search = searching(graph, budget_of(graph, 0.6), "sqrt_n")
    sizes.clear()
    work = neighbourhood.improve_part(search, neighbourhood.find_parts(graph)[0], nodes=1)
    least = math.ceil(sizes[-1] / VARIABLES_AN_ITERATION)
    assert work == (sizes[-1] if said is None else max(least, said))


def test_one_layer_s_answer_makes_the_others_faster() -> None:
    graph = layers(4)
    search = Search("parts", graph, budget_of(graph, 1.0))
    search.try_schedule(SOLVERS["sqrt_n"](graph, None).schedule)
    assert search.fastest is not None
    parts, seconds = neighbourhood.find_parts(graph), [search.fastest.seconds]
    for n, part in enumerate(parts):
        neighbourhood.improve_part(search, part, nodes=1_000)
        seconds.append(search.fastest.seconds)
        like = neighbourhood._like(n, [neighbourhood._signature(search, each) for each in parts])
        if seconds[-1] < seconds[-2] and like:
            neighbourhood._copy(search, part, [parts[m] for m in like])
            seconds.append(search.fastest.seconds)
            if seconds[-1] < seconds[-2]:
                return
    pytest.fail(f"nothing was copied: {seconds}")


@pytest.mark.parametrize("effort", ["fast", "best"])
@pytest.mark.parametrize(("share", "rounds"), [(0.55, None), (None, None), (None, 1)])
def test_the_portfolio_asks_for_it_once(
    effort: Effort, share: float | None, rounds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the least peak too, for the peak that is the least, however many smaller ones were tried before."""
    if rounds is not None:
        monkeypatch.setitem(EFFORTS, effort, replace(EFFORTS[effort], least_rounds=rounds))
    asked: list[tuple[int, int]] = []

    def noted(search: Search, *, work: int, nodes: int, enough: float, stretches: Sequence[int]) -> None:
        assert search.fastest is None or search.fastest.seconds > enough
        asked.append((work, nodes))

    monkeypatch.setattr(neighbourhood, "improve", noted)
    counts = []
    for seed in range(6):
        graph = random_dag(seed, 40, regions=3)
        asked_before = len(asked)
        budget = None if share is None else budget_of(graph, share)
        portfolio.solve(graph, budget, effort=effort, time_limit=5.0, minimum=False)
        counts.append(len(asked) - asked_before)
    settings = EFFORTS[effort]
    assert settings.parts_work > 0
    assert set(asked) == {(settings.parts_work, settings.parts_nodes)}
    assert max(counts) == 1


def test_long_graphs_are_improved_by_layers_only_where_answers_are_to_be_fast() -> None:
    several, one = layers(3), chain(24, 100)
    assert {op.region for op in several.ops} - {GLUE_REGION} == {0, 1, 2}
    fast, best = EFFORTS["fast"], EFFORTS["best"]
    assert fast.parts_pay(one, 0.006)
    assert not fast.parts_pay(one, 0.004)
    assert best.parts_pay(one, 0.004)
    assert not replace(fast, longest_in_stretches=20).parts_pay(one, 1.0)
    assert replace(fast, longest_in_stretches=20).parts_pay(several, 1.0)
    assert not fast.parts_pay(replace(one, in_flight=InFlight(2)), 1.0)


def test_it_ends_where_the_schedule_is_fast_enough() -> None:
    graph = layers(4)
    search = searching(graph, budget_of(graph, 0.5), "sqrt_n")
    assert search.fastest is not None
    begin = search.fastest
    neighbourhood.improve(search, work=100_000, nodes=20, enough=begin.seconds)
    assert search.fastest is begin
    neighbourhood.improve(search, work=100_000, nodes=20, enough=begin.seconds * (1 - 1e-6))
    first = search.fastest.seconds
    neighbourhood.improve(search, work=100_000, nodes=20)
    assert search.fastest.seconds < first < begin.seconds
