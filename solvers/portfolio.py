"""The portfolio, ``solver="auto"``: run what fits the graph and the time, polish, return the best.

In this order, each offering its schedules to one search: recompute nothing; a lower bound that
holds for every schedule (see ``bound``), which ends the search as soon as it is met; sqrt(n); the
single-recompute program from coarse to fine, with the recursive and chain forms, which recompute
more than once, in between; the exact program where the graph is small, and of one part after the
other where it is not; local polish by simulation and exchanges. At the time limit the best so far is
returned.

:func:`sweep` answers many budgets and is monotone by construction: from the smallest budget to the
largest, every schedule found for one is a candidate for all that follow.

Not optimal in general; the solution's ``gap`` says how far it can be from the optimum.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from solvers import sqrt_n
from solvers.chains import lower_sets, rotor
from solvers.effort import EFFORTS, Effort, PortfolioSettings
from solvers.least import bisect, floor_bytes
from solvers.local.exchange import exchange
from solvers.local.polish import delay, polish, trade
from solvers.model.arrays import Schedule
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.solution import Progress, Solution, Status
from solvers.programs import exact_ilp, ilp, neighbourhood, row_generation
from solvers.programs.lower_bound import (
    CAPTURED_ORDER,
    INTEGER_SECONDS,
    Bound,
    at_more_moments,
    lower_bound,
    tightened,
)

NAME = "auto"


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
        minimum: Whether an infeasible answer is to have the least peak of all, the one that a budget of
            None has; else it has the least that was met on the way, sooner.
        effort: How long to go on where the answer is hardly getting better.

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
        return _solve(shared, budget, left, progress, known, minimum)
    if np.isinf(most_seconds):
        return _least(shared, left, progress, known)
    return _least_within(shared, most_seconds, left, progress)


@dataclass(frozen=True)
class Shared:
    """What the budgets of one graph share."""

    programs: ilp.Programs
    lazy: row_generation.LazyRows
    tables: rotor.Tables
    floor: int
    settings: PortfolioSettings
    least: list[Solution] = field(default_factory=list)

    @staticmethod
    def of(graph: Graph, constraints: Constraints, effort: Effort) -> "Shared":
        """Nothing solved so far."""
        return Shared(
            ilp.Programs(graph, constraints),
            row_generation.LazyRows(graph, constraints),
            rotor.Tables(),
            floor_bytes(graph),
            EFFORTS[effort],
        )


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
) -> Solution:
    """The fastest schedule for one budget; where there is none and ``minimum`` is asked for, the least peak
    of all."""
    begin = time.perf_counter()
    search, bound = _attempt(shared, budget, time_limit, progress, known)
    if search.fastest is not None or not minimum:
        return _judge(search, bound, shared.settings.optimal_gap)
    assert search.least is not None
    lowest = _least(shared, time_limit, progress, [search.least.schedule])
    met = lowest.peak_bytes <= budget
    return replace(
        lowest,
        status=Status.FEASIBLE if met else Status.INFEASIBLE,
        solve_seconds=time.perf_counter() - begin,
    )


def _least(
    shared: Shared, time_limit: float, progress: Progress | None, known: Sequence[Schedule] = ()
) -> Solution:
    """The least peak, by the fastest schedule that is found of it; found once for each graph."""
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
        attempt, bound = _attempt(shared, budget, left / 2, None, [best.schedule], parts=last)
        assert attempt.least is not None
        if attempt.least.peak_bytes < best.peak_bytes:
            best = attempt.least
        elif budget == best.peak_bytes:
            if not last:
                _improve_part_by_part(attempt, bound, settings)
            best = attempt.fastest or best
            break
        else:
            proven = best.peak_bytes  # as far as is known
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

    def attempt(budget: int, seconds: float, known: Sequence[Schedule]) -> Solution:
        if lower_bound(graph, budget, time_limit=seconds / 4, integer_seconds=0.0).seconds > most_seconds:
            return best.infeasible()
        search, bound = _attempt(shared, budget, seconds, None, known)
        return _judge(search, bound, shared.settings.optimal_gap)

    best = search.solution()
    left, failures = time_limit - search.elapsed, shared.settings.least_failures
    best = bisect(attempt, shared.floor - 1, best, most_seconds, left, most_failures=failures)
    faster = attempt(best.peak_bytes, max(0.0, time_limit - search.elapsed), [best.schedule])
    best = faster if faster.feasible and faster.seconds <= best.seconds else best
    search.tell("least peak", 1.0)
    return replace(best, solve_seconds=search.elapsed)


def _attempt(
    shared: Shared,
    budget: int,
    time_limit: float,
    progress: Progress | None,
    known: Sequence[Schedule],
    *,
    parts: bool = True,
) -> tuple[Search, Bound]:
    """Run the portfolio on one budget, to the search part by part or without: everything found, and the
    bound."""
    programs, settings = shared.programs, shared.settings
    graph = programs.graph
    search = Search(NAME, graph, budget, settings.last_start * time_limit, progress, programs.constraints)
    large = graph.forward_length > ilp.FINE
    everything = search.try_everything()
    for schedule in known:
        search.try_schedule(schedule)
    if search.fits(everything):
        return search, Bound(graph.base_seconds, CAPTURED_ORDER)
    if budget < shared.floor:
        return search, Bound(float("inf"), CAPTURED_ORDER)
    patience = settings.patience(graph.forward_length, time_limit)
    bound = first_bound(graph, budget, time_limit)
    if np.isinf(bound.seconds):
        return search, bound
    search.begin_stage((0.0, 0.2), 0.4)
    row_generation.improve(search, budget, shared.lazy, seconds=patience)
    if not _done(search, bound, settings) and not (large and _distance(search, bound) <= settings.near):
        bound = tightened(graph, budget, bound, search.wall(min(INTEGER_SECONDS, patience / 4)))
    enough = bound.seconds + settings.met * graph.base_seconds
    if not large:
        search.begin_stage((0.15, 0.2), settings.small_trading_share)
        _improve_locally(search, bound, settings, trading=_distance(search, bound) > settings.near)
    far = _distance(search, bound) > settings.near
    if not _done(search, bound, settings) and far:
        search.begin_stage((0.2, 0.3), 0.4)
        sqrt_n.improve(search)
    twice_beyond = settings.nearer if large else settings.small_twice_beyond
    if not _done(search, bound, settings) and _distance(search, bound) > twice_beyond:
        search.begin_stage((0.3, 0.5), 0.5)
        if far or not large:
            rotor.improve(search, budget, everything.peak_bytes, shared.tables)
        else:
            counts = rotor.COUNTS[:1]
            rotor.improve(search, budget, everything.peak_bytes, shared.tables, counts=counts, kinds=1)
    programs_beyond = settings.near if large else settings.small_programs_beyond
    if not _done(search, bound, settings) and _distance(search, bound) > programs_beyond:
        left = max(time_limit - search.elapsed, 1e-9)
        search.begin_stage((0.5, 0.9), min(1.0, search.wall(settings.walled_programs * patience) / left))
        ilp.improve(search, budget, programs, enough=enough)
    search.begin_stage((0.9, 1.0), settings.large_trading_share if large else settings.small_trading_share)
    if not _done(search, bound, settings) and _distance(search, bound) > settings.far:
        lower_sets.improve(search, budget, everything.peak_bytes)
    if not _done(search, bound, settings) and exact_ilp.count_slots(graph) <= settings.exact_slots:
        seconds = search.wall(settings.exact_seconds)
        exact_ilp.answer(search, exact_ilp.find_slots(graph), budget, seconds=seconds)
    _improve_locally(search, bound, settings, trading=far or not large)
    if parts:
        _improve_part_by_part(search, bound, settings)
    search.begin_stage((0.0, 1.0))
    if _distance(search, bound) > settings.met:
        bound = at_more_moments(graph, budget, bound, search.wall(min(INTEGER_SECONDS, patience / 4)))
    search.tell("polished", 1.0)
    return search, bound


def _improve_part_by_part(search: Search, bound: Bound, settings: PortfolioSettings) -> None:
    """Improve the best schedule by programs of parts of it, where that can still pay."""
    if not _done(search, bound, settings) and _distance(search, bound) > settings.parts_beyond(search.graph):
        search.begin_stage((0.95, 1.0))
        neighbourhood.improve(search, work=settings.parts_work, nodes=settings.parts_nodes)


def _improve_locally(search: Search, bound: Bound, settings: PortfolioSettings, *, trading: bool) -> None:
    """Improve the best schedule by simulation, until a round brings nothing."""
    assert search.budget is not None
    for _ in range(settings.polishing_rounds):
        if search.fastest is None or search.out_of_time() or _done(search, bound, settings):
            break
        before = search.fastest.seconds
        delay(search, search.fastest)
        polish(search, search.fastest, search.budget)
        exchange(search, search.fastest, search.budget)
        if trading:
            trade(search, search.fastest, rounds=1)
        if search.fastest.seconds >= before:
            break


def first_bound(graph: Graph, budget: int, time_limit: float) -> Bound:
    """Seconds that no schedule for a budget undercuts, in a small share of so many wall seconds."""
    moments = 1 if graph.forward_length > ilp.FINE else 4
    return lower_bound(graph, budget, moments=moments, time_limit=time_limit / 4, integer_seconds=0.0)


def _distance(search: Search, bound: Bound) -> float:
    """How far the best schedule is above the bound, relative to the seconds of the step."""
    if search.fastest is None:
        return float("inf")
    return (search.fastest.seconds - bound.seconds) / search.graph.base_seconds


def _done(search: Search, bound: Bound, settings: PortfolioSettings) -> bool:
    """Whether all the time is up, not only the stage's, or the best schedule is as good as can be proven."""
    late = search.time_limit is not None and search.elapsed > search.time_limit
    return late or _distance(search, bound) <= settings.met


def _judge(search: Search, bound: Bound, optimal_gap: float) -> Solution:
    """The best schedule with the bound; optimal when it meets it."""
    solution = search.solution()
    if not solution.feasible:
        return solution
    seconds = min(bound.seconds, solution.seconds)
    met = solution.seconds <= seconds * (1 + optimal_gap)
    return replace(solution, bound_seconds=seconds, status=Status.OPTIMAL if met else Status.FEASIBLE)
