"""The portfolio, ``solver="auto"``: run what fits the graph and the time, polish, return the best.

:mod:`solvers.one_budget` has the methods for one budget, in their order.

:func:`sweep` answers many budgets and is monotone by construction: from the smallest budget to the
largest, every schedule found for one is a candidate for all that follow.

Not optimal in general; the solution's ``gap`` says how far it can be from the optimum.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from solvers import one_budget, sqrt_n
from solvers.chains import rotor
from solvers.effort import Effort, PortfolioSettings
from solvers.least import bisect
from solvers.model.arrays import Schedule
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.solution import Progress, Solution, Status
from solvers.one_budget import Attempt, Shared, attempt
from solvers.programs import exact_ilp, ilp
from solvers.programs.lower_bound import lower_bound

NAME = one_budget.NAME


def solve(
    graph: Graph,
    budget: int | None,
    *,
    time_limit: float | None = None,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
    known: Sequence[Schedule] = (),
    most_seconds: float = float("inf"),
    minimum: bool = True,
    effort: Effort = "best",
    rival: float = float("inf"),
) -> Solution:
    """Run the portfolio on one budget.

    Args:
        graph: The problem.
        budget: Bytes of dynamic peak. None asks for the least peak.
        time_limit: Wall seconds, 60 where none is given; most answers take a second or two. Where nothing
            fits, finding the least peak may take as long again.
        progress: Called with what is being done, and how much of it is done.
        constraints: Values that are always kept or always recomputed.
        known: Schedules found before (for other budgets, say) that are candidates too.
        most_seconds: Where the least peak is asked for, of the schedules that take no longer.
        minimum: Whether an infeasible answer must have the least peak of all, as with a budget of None; else
            it has the least of the search so far, and comes sooner.
        effort: How long to go on where the answer hardly gets better.
        rival: Seconds of an answer to another form of the same step; where the quick solvers' answer is much
            slower, the slow ones are left out.

    Returns:
        The fastest schedule found, with a bound that holds for every schedule, optimal where the two
        meet; infeasible with the least peak found, at however much recomputation. Of the least peak the
        fastest schedule found; infeasible if all schedules take longer than ``most_seconds``.
    """
    begin = time.perf_counter()
    shared = Shared.of(graph, constraints or NO_CONSTRAINTS, effort)
    limit = shared.settings.seconds if time_limit is None else time_limit
    left = max(0.0, limit - (time.perf_counter() - begin))
    if budget is not None:
        solution = _solve(shared, budget, left, progress, known, minimum, rival)
        if solution.feasible or not minimum or solution.peak_bytes > budget * shared.settings.nearly_fits:
            return solution
        thorough = Shared.of(graph, constraints or NO_CONSTRAINTS, "best")
        left = max(0.0, limit - (time.perf_counter() - begin))
        return _solve(thorough, budget, left, progress, [solution.schedule], rival=rival)
    if np.isinf(most_seconds):
        return _least(shared, left, progress, known)
    return _least_within(shared, most_seconds, left, progress)


def sweep(
    graph: Graph,
    budgets: Iterable[int | None],
    *,
    time_limit: float | None = None,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
    known: Sequence[Schedule] = (),
    effort: Effort = "best",
) -> list[Solution]:
    """Solve for many budgets, sharing programs and schedules between them.

    Args:
        graph: The problem.
        budgets: Bytes of dynamic peak, in any order; None for the least peak.
        time_limit: Wall seconds for all of them; 30 a budget at most.
        progress: Called with what is being done, and how much of it is done.
        constraints: Values that are always kept or always recomputed.
        known: Schedules found before that are candidates for all of them.
        effort: As for :func:`solve`.

    Returns:
        One solution a budget, in the order given. Seconds never rise with the budget.
    """
    wanted = list(budgets)
    lowest: list[int | None] = [None] if None in wanted else []
    ascending = [*lowest, *sorted({b for b in wanted if b is not None})]
    begin = time.perf_counter()
    shared = Shared.of(graph, constraints or NO_CONSTRAINTS, effort)
    settings = shared.settings
    found: dict[int | None, Solution] = {}
    left = (
        settings.sweep_seconds * len(ascending)
        if time_limit is None
        else time_limit - (time.perf_counter() - begin)
    )
    for n, budget in enumerate(ascending):
        before = [*known, *(s.schedule for s in list(found.values())[-1:])]
        share = min(settings.sweep_seconds, max(0.0, left) / (len(ascending) - n))
        if budget is None:
            solution = _least(shared, share, None, before)
        else:
            solution = _solve(shared, budget, share, None, before)
        left -= solution.solve_seconds
        found[budget] = solution
        if progress is not None:
            progress(f"budget {n + 1} of {len(ascending)}", (n + 1) / len(ascending))
    return [found[budget] for budget in wanted]


def _solve(
    shared: Shared,
    budget: int,
    time_limit: float,
    progress: Progress | None,
    known: Sequence[Schedule],
    minimum: bool = True,
    rival: float = float("inf"),
) -> Solution:
    """The fastest schedule for one budget; where none fits and ``minimum`` is true, that of least peak."""
    begin = time.perf_counter()
    result = attempt(shared, budget, time_limit, progress, known, rival=rival)
    if result.search.fastest is not None or not minimum:
        return _judge(result)
    assert result.search.least is not None
    lowest = _least(shared, time_limit, progress, [result.search.least.schedule])
    met = lowest.peak_bytes <= budget
    return replace(
        lowest,
        status=Status.FEASIBLE if met else Status.INFEASIBLE,
        solve_seconds=time.perf_counter() - begin,
    )


def _least(
    shared: Shared, time_limit: float, progress: Progress | None, known: Sequence[Schedule] = ()
) -> Solution:
    """The fastest schedule found of the least peak; searched once for each graph."""
    if shared.least:
        return shared.least[0]
    programs = shared.programs
    graph, floor, settings = programs.graph, shared.floor, shared.settings
    patience = settings.patience(graph.forward_length, time_limit)
    search = Search(NAME, graph, None, settings.least_share * time_limit, progress, programs.constraints)
    everything = search.try_everything()
    for schedule in known:
        search.try_schedule(schedule)
    sqrt_n.keep_nothing(search)
    forms: tuple[Callable[[], object], ...] = (
        lambda: sqrt_n.improve(search),
        lambda: ilp.descend(search, programs, seconds=patience),
        lambda: rotor.improve(search, None, everything.peak_bytes),
        lambda: _least_exactly(search, settings),
    )
    for n, form in enumerate(forms):
        if search.least is not None and search.least.peak_bytes > floor and not search.out_of_time():
            search.begin_stage((n / 8, (n + 1) / 8), 0.5)
            form()
    assert search.least is not None
    best = search.least
    proven = floor if settings.below_least else best.peak_bytes
    for n in range(settings.least_rounds):
        last = n + 1 == settings.least_rounds
        budget = best.peak_bytes - (best.peak_bytes > proven)
        left = max(0.0, time_limit - search.elapsed)
        result = attempt(shared, budget, left / 2, None, [best.schedule], parts=last)
        assert result.search.least is not None
        if result.search.least.peak_bytes < best.peak_bytes:
            best = result.search.least
        elif budget == best.peak_bytes:
            if not last:
                result.improve_part_by_part()
            best = result.search.fastest or best
            break
        else:
            proven = best.peak_bytes  # not proven: nothing smaller was found
    search.tell("least peak", 1.0)
    solution = Solution(
        NAME, Status.FEASIBLE, best.schedule, best.peak_bytes, best.seconds, search.elapsed, None
    )
    shared.least.append(solution)
    return solution


def _least_exactly(search: Search, settings: PortfolioSettings) -> None:
    """Offer the least peak of a small graph."""
    if search.least is not None and exact_ilp.count_slots(search.graph) <= settings.exact_slots:
        seconds, slots = search.wall(settings.exact_seconds), exact_ilp.find_slots(search.graph)
        exact_ilp.least_peak(search, slots, search.least.peak_bytes, seconds=seconds)


def _least_within(
    shared: Shared, most_seconds: float, time_limit: float, progress: Progress | None
) -> Solution:
    """The least peak of the schedules that take at most so many seconds; infeasible if none does."""
    programs = shared.programs
    graph = programs.graph
    search = Search(NAME, graph, None, time_limit / 2, progress, programs.constraints)
    search.most_seconds = most_seconds
    everything = search.try_everything()
    if search.least is None:
        return Solution(
            NAME, Status.INFEASIBLE, everything.schedule, everything.peak_bytes, everything.seconds,
            search.elapsed,
        )  # fmt: skip
    sqrt_n.improve(search)
    rotor.improve(search, None, everything.peak_bytes)
    patience = shared.settings.patience(graph.forward_length, time_limit)
    ilp.descend(search, programs, seconds=patience)

    def solve_for(budget: int, seconds: float, known: Sequence[Schedule]) -> Solution:
        if lower_bound(graph, budget, time_limit=seconds / 4, integer_seconds=0.0).seconds > most_seconds:
            return best.infeasible()
        return _judge(attempt(shared, budget, seconds, None, known))

    best = search.solution()
    left, failures = time_limit - search.elapsed, shared.settings.least_failures
    best = bisect(solve_for, shared.floor - 1, best, most_seconds, left, most_failures=failures)
    faster = solve_for(best.peak_bytes, max(0.0, time_limit - search.elapsed), [best.schedule])
    best = faster if faster.feasible and faster.seconds <= best.seconds else best
    search.tell("least peak", 1.0)
    return replace(best, solve_seconds=search.elapsed)


def _judge(this: Attempt) -> Solution:
    """The best schedule with the bound; optimal when it meets it."""
    solution = this.search.solution()
    if not solution.feasible:
        return solution
    seconds = min(this.bound.seconds, solution.seconds)
    met = solution.seconds <= seconds * (1 + this.settings.optimal_gap)
    return replace(solution, bound_seconds=seconds, status=Status.OPTIMAL if met else Status.FEASIBLE)
