"""The search for the largest batch: doubling and bisecting on estimated steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from planner.batch.interpolate import Sized, SizedSteps
from planner.batch.points import BatchChoice, BatchPoint, MaxBatch, named
from planner.choices import Outputs
from planner.errors import InfeasibleBudget
from planner.planfile.budget import Budget, format_bytes
from planner.planfile.schema import WholeStep
from planner.planning.make_plan import make_plan
from planner.planning.solve import find_solver
from planner.planning.within_budget import within_budget
from planner.progress import Progress
from planner.training_step.generators import generators_restored
from planner.training_step.inputs import InputError, read_inputs, read_step
from planner.training_step.python_state import PythonState
from planner.training_step.step import Loss, Step
from planner.user_plan import Plan
from solvers import portfolio
from solvers.effort import Effort
from solvers.least import least as lowest
from solvers.model.arrays import Schedule
from solvers.model.schedule import simulate
from solvers.model.solution import Solution, Status

MakeArguments = Callable[[int], Any]

QUICK_SECONDS = 8.0
"""Wall seconds for each estimated batch; graphs of some thousand operations take one or two."""
MOST_CAPTURES = 8
OVERHEADS = (0.15, 0.33, None)
"""Given beside the answer: the largest batches at these overheads, None for any."""
_NEAR = 0.02
"""How far below the largest those may be, relative: they are estimates, and each step to them is a solve."""


def step(
    model: torch.nn.Module, make_args: MakeArguments, size: int, loss: Loss | None, outputs: Outputs
) -> Step:
    """The step of a batch; the states of random generators are restored."""
    try:
        with generators_restored(PythonState([], [make_args]).generators):
            made = make_args(size)
    except Exception as error:
        raise InputError(f"make_args({size}) raised {type(error).__name__}: {error}") from error
    args, kwargs = read_inputs(made, f"make_args({size})")
    return read_step(model, args, kwargs, loss, outputs, of="max_batch")


class BatchSearch:
    """Searches for largest batches; captures and schedules are shared between its runs."""

    def __init__(
        self,
        steps: SizedSteps,
        budget: Budget,
        *,
        solver: str = portfolio.NAME,
        effort: Effort = "fast",
        time_limit: float = 60,
        quick_seconds: float = QUICK_SECONDS,
        most: int = 1 << 20,
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            steps: The steps by batch.
            budget: Bytes for the whole step.
            solver, effort, time_limit, most, progress: As for :func:`max_batch`.
            quick_seconds: As `time_limit`, of each estimated batch.
        """
        assert budget.bytes is not None
        self.steps, self.solver, self.effort, self.time_limit, self.most = (
            steps,
            solver,
            effort,
            time_limit,
            most,
        )
        self.budget_bytes, self.budget_text = budget.bytes, budget.text
        self._quick_seconds = min(quick_seconds, time_limit)
        self._progress = progress
        self._max_overhead: float | None = None
        self._reference: float | None = None  # seconds per sample of the largest unplanned batch
        self._schedules: list[Schedule] = []
        self._solutions: dict[int, Solution] = {}
        self._fraction = 0.0
        self._below = most + 1  # the least batch, of those that are captured, for which no plan was found

    def tell(self, text: str, fraction: float | None = None) -> None:
        """Report progress, which never goes back."""
        self._fraction = max(self._fraction, fraction or 0.0)
        if self._progress is not None:
            self._progress(text, self._fraction)

    def run(
        self, start: int = 4, max_overhead: float | None = None, others: Sequence[float | None] = ()
    ) -> MaxBatch:
        """Search and confirm; arguments and errors are those of :func:`max_batch`.

        Args:
            others: Overheads for which to estimate the largest batch as well.
        """
        self._max_overhead, self._solutions, self._fraction = max_overhead, {}, 0.0
        self._below = self.most + 1
        if len(self.steps.captured) < 2:
            self._capture_two(start)
        self.tell("looking for the largest batch", 0.4)
        unplanned = self._confirmed_unplanned()
        if unplanned is not None and self.steps.at(unplanned).eager_seconds > 0:
            # As it is, or captured: what entering graphs takes is no price of a larger batch.
            largest = self.steps.at(unplanned)
            self._reference = max(largest.eager_seconds, largest.graph.base_seconds) / unplanned
        answer = self._grow_and_bisect(unplanned or 0)
        while True:
            self.tell(f"planning batch {answer}", 0.8)
            known = answer in self.steps.captured
            step = self.steps.capture(answer)
            solution = self._solve(step, self.time_limit)
            if not self._allowed(step, solution):
                solution = self._known_that_fits(step) or solution
            if self._allowed(step, solution):
                self._solutions[answer] = solution
                self._schedules.append(solution.schedule)
                larger = self._grow_and_bisect(answer, _step_from(answer))
                if larger == answer or len(self.steps.captured) >= MOST_CAPTURES:
                    break
                answer = larger
            elif answer == 1:
                raise self._infeasible(step, solution)
            else:
                # Now that the captures surround the answer, what they say of smaller batches is close;
                # where that is not enough, one sample less is.
                self._solutions.pop(answer, None)
                self._below = answer
                answer = max(1, answer - 1 if known else self._shrink_and_bisect(answer))
        return self._result(answer, unplanned, others)

    def _capture_two(self, start: int) -> None:
        """One capture, and one near the batch at which the unplanned step should just fit."""
        self.tell(f"batch {start}: capturing", 0.0)
        first = self.steps.capture(start)
        fixed = first.footprint.around(first.footprint.resident.total)
        per_sample = max(first.unplanned_bytes - fixed, 1) / start
        second = int((self.budget_bytes - fixed) / per_sample)
        second = min(max(second, 2 * start), self.most)
        if second == start:
            if start == 1:
                return  # no other batch may be tried
            second = start // 2
        self.tell(f"batch {second}: capturing", 0.2)
        other = self.steps.capture(second)
        resident = first.footprint.resident.total, other.footprint.resident.total
        if first.unplanned_bytes == other.unplanned_bytes and resident[0] == resident[1]:
            raise InputError(
                f"the inputs of make_args({start}) and make_args({second}) take the same memory, and so do "
                "their steps: make as many samples as the argument says, as in "
                "lambda batch: (torch.empty(batch, 3, 224, 224),)"
            )

    def _confirmed_unplanned(self) -> int | None:
        """The largest batch that fits unplanned, captured: between captures bytes may grow faster than the
        estimate, with the square of a length, say."""
        while True:
            found = self._largest_unplanned()
            if found is None or found in self.steps.captured or len(self.steps.captured) >= MOST_CAPTURES:
                return found
            self.tell(f"batch {found}: capturing", 0.4)
            self.steps.capture(found)

    def _largest_unplanned(self) -> int | None:
        def fits(size: int) -> bool:
            return self.steps.at(size).unplanned_bytes <= self.budget_bytes

        if not fits(1):
            return None
        low, high = 1, 2
        while high <= self.most and fits(high):
            low, high = high, 2 * high
        high = min(high, self.most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _grow_and_bisect(self, known: int, step: int = 0) -> int:
        """The largest batch that fits by estimate, at least `known`; at least 1.

        Args:
            step: The first step above `known + 1`, later ones are twice as large; as large as `known` if 0.
        """
        low, high = known, max(known + 1, 1)
        step = step or max(known, 1)
        while high < self._below and self._fits(high):
            low, high = high, high + step
            step *= 2
        return max(self._bisect(low, min(high, self._below)), 1)

    def _shrink_and_bisect(self, high: int) -> int:
        """The largest batch below `high`, and not far below, that fits by estimate; 0 if none does."""
        step, low = _step_from(high), max(high - _step_from(high), 0)
        while low and not self._fits(low):
            high, step = low, 2 * step
            low = max(high - step, 0)
        return self._bisect(low, high)

    def _bisect(self, low: int, high: int, near: float = 0.0) -> int:
        """The largest batch below `high` that fits, or one `near` it, as `low` does (0 always does)."""
        while high - low > max(1, near * low):
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, size: int) -> bool:
        step = self.steps.at(size)
        if self._known_that_fits(step) is not None:
            self.tell(f"batch {size} fits")
            return True
        solution = self._solve(step, self._quick_seconds)
        if not self._allowed(step, solution):
            self.tell(f"batch {size} does not fit")
            return False
        self._schedules.append(solution.schedule)
        self._solutions[size] = solution
        self.tell(f"batch {size} fits")
        return True

    def _known_that_fits(self, step: Sized) -> Solution | None:
        """The latest schedule, of any batch, that fits and is fast enough for this one."""
        room = step.room_bytes(self.budget_bytes)
        for schedule in reversed(self._schedules):
            if len(schedule) and _belongs(schedule, step):
                timeline = simulate(step.graph, schedule)
                peak, seconds = timeline.peak_bytes, timeline.seconds
                fast = self._fast_enough(step, seconds)
                if peak <= room and fast and step.total_bytes(schedule) <= self.budget_bytes:
                    return Solution(self.solver, Status.FEASIBLE, schedule, peak, seconds, 0.0)
        return None

    def _solve(self, step: Sized, seconds: float) -> Solution:
        def solve(room: int, seconds: float) -> Solution:
            if self.solver != portfolio.NAME:
                return find_solver(self.solver)(step.graph, room, time_limit=seconds)
            known = [s for s in self._schedules[-4:] if _belongs(s, step)]
            return portfolio.solve(
                step.graph,
                room,
                time_limit=seconds,
                known=known,
                minimum=step.size == 1,
                effort=self.effort,
            )

        solution = solve(step.room_bytes(self.budget_bytes), seconds)
        if step.footprint.device.kind != "cuda":
            return solution
        return within_budget(
            solution,
            self.budget_bytes,
            step.total_bytes,
            solve,
            time_limit=seconds,
            too_slow=lambda found: step.size > 1 and not self._fast_enough(step, found.seconds),
            enough=lambda found: self._fast_enough(step, found.seconds),
        )

    def _allowed(self, step: Sized, solution: Solution) -> bool:
        return solution.feasible and self._fast_enough(step, solution.seconds)

    def _fast_enough(self, step: Sized, seconds: float) -> bool:
        return self._max_overhead is None or self._overhead(step, seconds) <= self._max_overhead

    def _overhead(self, step: Sized, seconds: float) -> float:
        reference = self._reference or step.graph.base_seconds / step.size
        return seconds / step.size / reference - 1 if reference else 0.0

    def _point(self, size: int, memory: WholeStep, seconds: float) -> BatchPoint:
        step = self.steps.at(size)
        whole = seconds + step.footprint.optimizer.seconds
        return BatchPoint(
            batch=size,
            total_bytes=memory.total_bytes,
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            seconds=whole,
            samples_per_second=size / whole if whole else 0.0,
            overhead=self._overhead(step, seconds),
            captured=size in self.steps.captured,
        )

    def _result(self, answer: int, unplanned: int | None, others: Sequence[float | None]) -> MaxBatch:
        prepared, allowed = self.steps.prepared[answer], self._max_overhead
        budget = Budget(self.budget_bytes, self.budget_text)
        plan = Plan.of(make_plan(prepared, self._solutions[answer], budget))
        points = self._points(answer)
        without = None
        if unplanned is not None:
            step = self.steps.at(unplanned)
            without = replace(self._point(unplanned, step.unplanned, step.eager_seconds), planned=False)
        largest = {allowed: points[-1]}
        for share in others:
            if share not in largest:
                self.tell(f"looking for the {named(share)}", 0.9)
                point = self._largest_at(share, {k: p.batch for k, p in largest.items()}, unplanned or 0)
                largest |= {share: point} if point is not None else {}
        self._max_overhead = allowed
        known = [*points, *([without] if without is not None else [])]
        fastest = max([*largest.values(), *known], key=lambda point: point.samples_per_second)
        choices = [] if without is None else [BatchChoice("no plan", without)]
        choices.append(BatchChoice("fastest", fastest))
        choices += [BatchChoice(named(s), largest[s], s) for s in sorted(largest, key=_price)]
        self.tell("planned", 1.0)
        return MaxBatch(
            batch=answer,
            plan=plan,
            budget_bytes=self.budget_bytes,
            largest=points[-1],
            unplanned=without,
            fastest=fastest,
            points=points,
            captures=len(self.steps.captured),
            choices=choices,
        )

    def _points(self, most: int) -> list[BatchPoint]:
        return [
            self._point(size, self.steps.at(size).whole_step(solution.schedule), solution.seconds)
            for size, solution in sorted(self._solutions.items())
            if size <= most
        ]

    def _largest_at(
        self, share: float | None, known: dict[float | None, int], unplanned: int
    ) -> BatchPoint | None:
        """About the largest batch at another overhead, by estimate, from those at known overheads."""
        self._max_overhead = share
        below = [batch for other, batch in known.items() if _price(other) <= _price(share)]
        above = [batch for other, batch in known.items() if _price(other) > _price(share)]
        low = max([unplanned, *below])
        high = min(above, default=0)
        if not high:
            more, high = max(low, 1), low + 1
            while high <= self.most and self._fits(high):
                low, high = high, high + more
                more *= 2
            high = min(high, self.most + 1)
        low = max(self._bisect(low, high, _NEAR), 1)
        step = self.steps.at(low)
        if low not in self._solutions:  # it fits by a schedule of another batch
            self._solutions[low] = self._solve(step, self._quick_seconds)
        solution = self._solutions[low]
        if not self._allowed(step, solution):
            return None
        return self._point(low, step.whole_step(solution.schedule), solution.seconds)

    def _infeasible(self, step: Sized, solution: Solution) -> InfeasibleBudget:
        if not solution.feasible and self.solver != portfolio.NAME:
            # What a solver answers to a budget that it does not meet need not be its least.
            solution = lowest(find_solver(self.solver), step.graph, time_limit=self.time_limit).infeasible()
        least = step.total_bytes(solution.schedule)
        slow = solution.feasible
        return InfeasibleBudget(
            f"budget {self.budget_text} is {format_bytes(self.budget_bytes)} ({self.budget_bytes:,} bytes), "
            + (
                f"which one sample meets only at more than {100 * (self._max_overhead or 0):.0f} % extra "
                "time; max_overhead=None (--max-overhead any) allows that"
                if slow
                else f"but one sample needs at least {format_bytes(least)} ({least:,} bytes)"
            ),
            minimum_bytes=least,
            budget_bytes=self.budget_bytes,
        )


def _belongs(schedule: Schedule, step: Sized) -> bool:
    """Whether a schedule can be one of a step's graph; estimated steps share their rows."""
    rows, base = len(step.graph.ops), step.graph.base_length
    return bool(schedule.max(initial=-1) < rows and np.unique(schedule[schedule < base]).size == base)


def _step_from(answer: int) -> int:
    """The first step from an estimated answer that a capture has corrected; it was not far off."""
    return max(1, answer // 64)


def _price(max_overhead: float | None) -> float:
    return float("inf") if max_overhead is None else max_overhead
