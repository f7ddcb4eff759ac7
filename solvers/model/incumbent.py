"""The best of many schedules: the search that solvers offer their candidates to."""

import time
from dataclasses import dataclass, field

import numpy as np

from solvers.model.arrays import Schedule, ValueMask
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import Graph
from solvers.model.just_in_time import Forget, recompute
from solvers.model.schedule import Timeline, simulate
from solvers.model.solution import Progress, Solution, Status


@dataclass(frozen=True)
class Candidate:
    """A simulated schedule, and the kept values it was made from where it was made so."""

    schedule: Schedule
    timeline: Timeline
    kept: ValueMask | None = None

    @property
    def peak_bytes(self) -> int:
        """Simulated dynamic peak."""
        return self.timeline.peak_bytes

    @property
    def seconds(self) -> float:
        """Simulated seconds."""
        return self.timeline.seconds


@dataclass
class Search:
    """Candidates of one solver for one budget; remembers the best two of them.

    Attributes:
        solver: Name of the solver.
        graph: The problem.
        budget: Bytes of dynamic peak; None asks for the least peak.
        time_limit: Wall seconds after which :attr:`out_of_time` is true; None for no limit.
        progress: Called with the present action and the fraction done.
        constraints: Applied to all kept values that are tried.
        span: The part of the progress, from and to, that :meth:`tell` reports its fractions within.
        stage_end: Value of :attr:`elapsed` at which the present stage is to give way to the next.
        most_seconds: Schedules slower than this do not count as fitting.
        fastest: The fastest candidate within the budget.
        least: The candidate of least peak.
    """

    solver: str
    graph: Graph
    budget: int | None
    time_limit: float | None = None
    progress: Progress | None = None
    constraints: Constraints = NO_CONSTRAINTS
    span: tuple[float, float] = (0.0, 1.0)
    stage_end: float = float("inf")
    most_seconds: float = float("inf")
    fastest: Candidate | None = None
    least: Candidate | None = None
    started: float = field(default_factory=lambda: time.perf_counter())  # by the clock that `elapsed` reads
    process_started: float = field(default_factory=lambda: time.process_time())
    _seen: set[bytes] = field(default_factory=set)

    @property
    def elapsed(self) -> float:
        """Wall seconds since the search began."""
        return time.perf_counter() - self.started

    @property
    def process_elapsed(self) -> float:
        """Process seconds since the search began. Effort is measured in these: up to the time limit, a busy
        machine changes the time that an answer takes, but not the answer."""
        return time.process_time() - self.process_started

    def wall(self, process_seconds: float) -> float:
        """About the wall seconds that ``process_seconds`` take at the present load; at most those left."""
        load = max(1.0, self.elapsed / max(1e-3, self.process_elapsed))
        return min(process_seconds * load, self.seconds_left)

    @property
    def seconds_left(self) -> float:
        """Wall seconds until the end of the stage or the time limit; inf without either."""
        end = self.stage_end if self.time_limit is None else min(self.stage_end, self.time_limit)
        return end - self.elapsed

    def out_of_time(self) -> bool:
        """Whether to stop with the candidates so far: the time of the stage, or of the search, is up."""
        return self.seconds_left < 0 and self.least is not None

    def begin_stage(self, span: tuple[float, float], share: float = 1.0) -> None:
        """Begin a stage that reports progress within ``span`` and takes a share of the time left."""
        self.span = span
        left = float("inf") if self.time_limit is None else max(0.0, self.time_limit - self.elapsed)
        self.stage_end = float("inf") if share == 1.0 else self.elapsed + share * left

    def tell(self, text: str, done: float) -> None:
        """Report progress, a fraction done of the present span."""
        if self.progress is not None:
            low, high = self.span
            self.progress(text, low + done * (high - low))

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate is within the budget."""
        return self.budget is not None and candidate.peak_bytes <= self.budget

    def try_kept(self, kept: ValueMask, forget: Forget | None = None) -> Candidate:
        """Judge the schedule that keeps these values, constraints applied."""
        kept = self.constraints.apply(kept)
        return self.try_schedule(recompute(self.graph, kept, forget=forget), kept if forget is None else None)

    def try_everything(self) -> Candidate:
        """Judge the schedule that recomputes nothing, constraints applied."""
        return self.try_kept(np.ones(len(self.graph.values), dtype=bool))

    def is_settled(self, everything: Candidate) -> bool:
        """Whether recomputing nothing fits, or there is no backward phase to recompute in."""
        return self.fits(everything) or self.graph.forward_length == self.graph.base_length

    def try_schedule(self, schedule: Schedule, kept: ValueMask | None = None) -> Candidate:
        """Judge a schedule, which must honour the constraints already."""
        candidate = Candidate(schedule, simulate(self.graph, schedule), kept)
        self.offer(candidate)
        return candidate

    def offer(self, candidate: Candidate) -> None:
        """Remember a candidate if it is the best of its kind."""
        peak, seconds = candidate.peak_bytes, candidate.seconds
        if seconds > self.most_seconds * (1 + 1e-9):
            return
        if self.least is None or (peak, seconds) < (self.least.peak_bytes, self.least.seconds):
            self.least = candidate
        if self.fits(candidate) and (
            self.fastest is None or (seconds, peak) < (self.fastest.seconds, self.fastest.peak_bytes)
        ):
            self.fastest = candidate

    def is_new(self, key: bytes) -> bool:
        """Whether this key is seen for the first time: candidates are not judged twice."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def solution(self, *, bound_seconds: float | None = None, optimal: bool = False) -> Solution:
        """The best candidate as a typed answer."""
        best = self.least if self.budget is None else self.fastest
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        if best is None:
            best, status = self.least, Status.INFEASIBLE
        if best is None:
            raise RuntimeError("a solver ended without a single candidate")
        return Solution(
            self.solver, status, best.schedule, best.peak_bytes, best.seconds, self.elapsed, bound_seconds
        )
