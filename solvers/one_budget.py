"""One budget: all methods that fit the graph and the time, in turn.

In this order, each offering its schedules to one search: recompute nothing; a lower bound that
holds for every schedule (see ``bound``), which ends the search as soon as it is met; sqrt(n); the
single-recompute program from coarse to fine, with the recursive and chain forms, which recompute
more than once, in between; the exact program where the graph is small, and of one part after the
other where it is not; local polish by simulation and exchanges. At the time limit the best so far is
returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from solvers import sqrt_n
from solvers.chains import lower_sets, rotor
from solvers.effort import EFFORTS, Effort, PortfolioSettings
from solvers.least import floor_bytes
from solvers.local.exchange import exchange
from solvers.local.polish import delay, polish, trade
from solvers.model.arrays import Schedule
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.solution import Progress, Solution
from solvers.programs import exact_ilp, ilp, neighbourhood, row_generation
from solvers.programs.lower_bound import (
    CAPTURED_ORDER,
    INTEGER_SECONDS,
    NOT_BOUNDED,
    Bound,
    at_more_moments,
    lower_bound,
    tightened,
)

NAME = "auto"


@dataclass(frozen=True)
class Shared:
    """The programs, tables and results that all budgets of one graph share."""

    programs: ilp.Programs
    lazy: row_generation.LazyRows
    tables: rotor.Tables
    floor: int
    settings: PortfolioSettings
    least: list[Solution] = field(default_factory=list)

    @staticmethod
    def of(graph: Graph, constraints: Constraints, effort: Effort) -> "Shared":
        """The same for a graph of which nothing is solved yet."""
        return Shared(
            ilp.Programs(graph, constraints),
            row_generation.LazyRows(graph, constraints),
            rotor.Tables(),
            floor_bytes(graph),
            EFFORTS[effort],
        )


@dataclass
class Attempt:
    """One budget: everything found for it, and seconds that no schedule undercuts.

    Attributes:
        search: The candidates so far.
        settings: How much is tried.
        rival: Seconds of an answer to another form of the same step, which this one has to undercut.
        bound: A lower bound on the seconds of every schedule.
    """

    search: Search
    settings: PortfolioSettings
    rival: float = float("inf")
    bound: Bound = NOT_BOUNDED

    @property
    def distance(self) -> float:
        """How far the best schedule is above the bound, relative to the seconds of the step."""
        fastest, graph = self.search.fastest, self.search.graph
        if fastest is None:
            return float("inf")
        return (fastest.seconds - self.bound.seconds) / (graph.base_seconds or 1.0)  # nothing may take time

    @property
    def done(self) -> bool:
        """Whether the whole time is up, not only the stage's, or the best schedule meets the bound."""
        search = self.search
        late = search.time_limit is not None and search.elapsed > search.time_limit
        return late or self.distance <= self.settings.met

    @property
    def is_hopeless(self) -> bool:
        """Whether the best schedule of the quick methods is so much slower than the rival that the slow ones
        are not expected to make up for it."""
        fastest, graph = self.search.fastest, self.search.graph
        return (
            fastest is not None and fastest.seconds - self.rival > self.settings.hopeless * graph.base_seconds
        )

    def improve_locally(self, *, trading: bool) -> None:
        """Improve the best schedule by simulation, until a round brings nothing."""
        search = self.search
        assert search.budget is not None
        for _ in range(self.settings.polishing_rounds):
            if search.fastest is None or search.out_of_time() or self.done:
                break
            before = search.fastest.seconds
            delay(search, search.fastest)
            polish(search, search.fastest, search.budget)
            exchange(search, search.fastest, search.budget)
            if trading:
                trade(search, search.fastest, rounds=1)
            if search.fastest.seconds >= before:
                break

    def improve_part_by_part(self) -> None:
        """Improve the best schedule by programs of parts of it, where that can still pay."""
        search, settings = self.search, self.settings
        if not self.done and settings.parts_pay(search.graph, self.distance):
            search.begin_stage((0.95, 1.0))
            enough = self.bound.seconds + settings.parts_enough * search.graph.base_seconds
            neighbourhood.improve(
                search,
                work=settings.parts_work,
                nodes=settings.parts_nodes,
                enough=enough,
                stretches=settings.parts_stretches,
            )


def attempt(
    shared: Shared,
    budget: int,
    time_limit: float,
    progress: Progress | None,
    known: Sequence[Schedule],
    *,
    parts: bool = True,
    rival: float = float("inf"),
) -> Attempt:
    """Find the fastest schedule for a budget.

    Args:
        shared: Programs, tables and results of other budgets of the graph.
        budget: Bytes of dynamic peak.
        time_limit: Wall seconds.
        progress: Called with the present action and the fraction done.
        known: Schedules found before, which are candidates too.
        parts: Whether to search part by part as well.
        rival: As for :class:`Attempt`.
    """
    programs, settings = shared.programs, shared.settings
    graph = programs.graph
    search = Search(NAME, graph, budget, settings.last_start * time_limit, progress, programs.constraints)
    result = Attempt(search, settings, rival)
    large = graph.forward_length > ilp.FINE
    everything = search.try_everything()
    for schedule in known:
        search.try_schedule(schedule)
    if search.fits(everything):
        result.bound = Bound(graph.base_seconds, CAPTURED_ORDER)
        return result
    if budget < shared.floor:
        result.bound = Bound(float("inf"), CAPTURED_ORDER)
        return result
    patience = settings.patience(graph.forward_length, time_limit)
    result.bound = first_bound(graph, budget, time_limit)
    if np.isinf(result.bound.seconds):
        return result
    search.begin_stage((0.0, 0.2), 0.4)
    row_generation.improve(search, budget, shared.lazy, seconds=patience)
    if not result.done and not (large and result.distance <= settings.near):
        result.bound = tightened(graph, budget, result.bound, search.wall(min(INTEGER_SECONDS, patience / 4)))
    if not large:
        search.begin_stage((0.15, 0.2), settings.small_trading_share)
        result.improve_locally(trading=result.distance > settings.near)
    if not result.done:  # before the slow ways, which a higher bound makes needless
        seconds = search.wall(min(INTEGER_SECONDS, patience / 4))
        result.bound = at_more_moments(graph, budget, result.bound, seconds)
    far = result.distance > settings.near
    if not result.done and far:
        search.begin_stage((0.2, 0.3), 0.4)
        sqrt_n.improve(search)
    twice_beyond = settings.large_twice_beyond if large else settings.small_twice_beyond
    if not result.done and result.distance > twice_beyond:
        search.begin_stage((0.3, 0.5), 0.5)
        if far or not large:
            rotor.improve(search, budget, everything.peak_bytes, shared.tables)
        else:
            counts = rotor.COUNTS[:1]
            rotor.improve(search, budget, everything.peak_bytes, shared.tables, counts=counts, kinds=1)
    if not result.is_hopeless:
        _solve_programs(result, programs, budget, time_limit, patience)
    search.begin_stage((0.9, 1.0), settings.large_trading_share if large else settings.small_trading_share)
    if not result.done and result.distance > settings.far:
        lower_sets.improve(search, budget, everything.peak_bytes)
    if not result.done and not result.is_hopeless and exact_ilp.count_slots(graph) <= settings.exact_slots:
        seconds = search.wall(settings.exact_seconds)
        exact_ilp.answer(search, exact_ilp.find_slots(graph), budget, seconds=seconds)
    result.improve_locally(trading=far or not large)
    if parts and not result.is_hopeless:
        result.improve_part_by_part()
    search.begin_stage((0.0, 1.0))
    search.tell("polished", 1.0)
    return result


def _solve_programs(
    result: Attempt, programs: ilp.Programs, budget: int, time_limit: float, patience: float
) -> None:
    """The single-recompute program from coarse to fine, where that can still pay."""
    search, settings = result.search, result.settings
    large = search.graph.forward_length > ilp.FINE
    beyond = settings.large_programs_beyond if large else settings.small_programs_beyond
    if not result.done and result.distance > beyond:
        left = max(time_limit - search.elapsed, 1e-9)
        search.begin_stage((0.5, 0.9), min(1.0, search.wall(settings.walled_programs * patience) / left))
        enough = result.bound.seconds + settings.met * search.graph.base_seconds
        ilp.improve(search, budget, programs, enough=enough)


def first_bound(graph: Graph, budget: int, time_limit: float) -> Bound:
    """Seconds that no schedule for a budget undercuts, in a small share of so many wall seconds."""
    moments = 1 if graph.forward_length > ilp.FINE else 4
    # Of 1,302 operations (`transformer(100)` of `tests/graphs.py`) it takes 0.04 s: a quarter ends odd ones.
    return lower_bound(graph, budget, moments=moments, time_limit=time_limit / 4, integer_seconds=0.0)
