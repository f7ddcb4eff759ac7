"""The largest batch that fits a budget, found without running out of memory.

Two captures say how every byte and second grows with the batch (see :mod:`planner.sizes`). The search
doubles and bisects on estimated steps, each solved in a second or two; a schedule that was found for one
batch is tried on the others first. The answer is captured and solved in full; where that capture says that
the estimate was off, the search goes on from it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from planner._torch_attention import Attention
from planner.api import find_solver
from planner.assembly import CostSource, Prepared, make_plan, prepare
from planner.budget import Budget, format_bytes, parse_budget
from planner.devices import Device
from planner.errors import BudgetError, InfeasibleBudget
from planner.inputs import InputError, check_loss, check_model, read_inputs, read_step
from planner.optimizer import Optimizer
from planner.plan_file import Plan
from planner.sizes import Sized, SizedSteps
from planner.step import Loss, Outputs, Step
from solvers import portfolio
from solvers.schedule import simulate
from solvers.solution import Solution

Progress = Callable[[str, float], None]
MakeArguments = Callable[[int], Any]

QUICK_SECONDS = 8.0
"""Wall seconds for each estimated batch; graphs of some thousand operations take one or two."""
MOST_CAPTURES = 8


@dataclass(frozen=True)
class BatchPoint:
    """One batch, with the fastest plan found for it.

    Attributes:
        batch: The batch.
        total_bytes: What the device must have for the whole step.
        seconds: Predicted time of forward, backward and the optimizer's step.
        samples_per_second: Batch over seconds.
        overhead: Time of forward and backward per sample, over that of the largest unplanned batch:
            0.29 is 29 % slower. Over the same batch without recomputation where no unplanned batch fits.
        captured: The step was captured at this batch, not estimated from others.
    """

    batch: int
    total_bytes: int
    seconds: float
    samples_per_second: float
    overhead: float
    captured: bool


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch within a budget.

    Attributes:
        batch: The largest batch.
        plan: The plan for it.
        budget_bytes: What bounded it.
        largest: The largest batch's figures.
        unplanned: The largest batch that fits without a plan; None where not even one sample does.
        fastest: The planned batch of most samples a second among `points`.
        points: The planned batches that were found to fit, ascending.
        captures: How often the step was captured.
    """

    batch: int
    plan: Plan
    budget_bytes: int
    largest: BatchPoint
    unplanned: BatchPoint | None
    fastest: BatchPoint
    points: list[BatchPoint]
    captures: int

    @property
    def ratio(self) -> float | None:
        """How many times the unplanned batch the planned one is; None where nothing fits unplanned."""
        return self.batch / self.unplanned.batch if self.unplanned else None

    def to_dict(self) -> dict[str, Any]:
        """Everything but the plan, as plain data."""
        return {
            "batch": self.batch,
            "ratio": self.ratio,
            "budget_bytes": self.budget_bytes,
            "unplanned": None if self.unplanned is None else asdict(self.unplanned),
            "fastest": asdict(self.fastest),
            "points": [asdict(point) for point in self.points],
            "captures": self.captures,
        }


def max_batch(
    model: torch.nn.Module,
    make_args: MakeArguments,
    budget: int | str,
    *,
    max_overhead: float | None = None,
    solver: str = "auto",
    loss: Loss | None = None,
    outputs: Outputs = "held",
    optimizer: Optimizer | None = None,
    device: str | torch.device | Device | None = None,
    attention: Attention | None = None,
    accumulate: bool | None = None,
    costs: CostSource = "roofline",
    start: int = 4,
    most: int = 1 << 20,
    training: bool = True,
    time_limit: float = 60,
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest batch (sequence length, image size) whose step fits a budget, and plan it.

    Args:
        model: Any module; it is not touched.
        make_args: Makes the inputs of a batch, in any form that :func:`planner.plan` takes as ``args``, or
            a pair of positional and keyword arguments. Tensors on the meta device do, and cost nothing.
        budget: Bytes as an int or text ("32GiB") for the whole step; on a GPU for all that it takes of
            the device.
        max_overhead: The most that time per sample may rise over that of the largest unplanned batch:
            0.29 allows 29 %. None: whatever it takes.
        solver, loss, outputs, optimizer, device, attention, accumulate, costs, training: As for
            :func:`planner.plan`.
        start: The first batch that is captured.
        most: No batch larger than this is tried.
        time_limit: Wall seconds for the plan of each captured answer.
        progress: Called with a text and a fraction from 0 to 1.

    Returns:
        The largest batch with its plan, the largest unplanned one, and the fastest.

    Raises:
        BudgetError: The budget is a percentage or "min", which say nothing without a batch.
        InputError: Model, inputs or loss are in no form that can be read.
        CaptureError: The step cannot be captured.
        InfeasibleBudget: Not even one sample fits; ``.minimum_bytes`` is what it needs.
    """
    if not callable(make_args):
        raise InputError(
            f"make_args is a {type(make_args).__name__}: expected a function from a batch to the inputs, "
            "as in lambda batch: (torch.empty(batch, 3, 224, 224),)"
        )
    check_model(model)
    check_loss(loss)
    wanted = parse_budget(budget, 2**60)
    if wanted.bytes is None or wanted.text.endswith("%"):
        raise BudgetError(f'budget {wanted.text!r} depends on the batch: give bytes, as "32GiB"')
    if start < 1 or most < 1:
        raise ValueError(f"start and most are batches, at least 1, not {start} and {most}")
    find_solver(solver)

    def capture(size: int) -> Prepared:
        return prepare(
            model,
            replace(_step(model, make_args, size, loss, outputs), training=training),
            optimizer=optimizer,
            device=device,
            attention=attention,
            accumulate=accumulate,
            costs=costs,
            progress=lambda text, _: search.tell(f"batch {size}: {text}"),
        )

    search = BatchSearch(
        SizedSteps(capture), wanted, solver=solver, time_limit=time_limit, most=most, progress=progress
    )
    return search.run(min(start, most), max_overhead)


def _step(
    model: torch.nn.Module, make_args: MakeArguments, size: int, loss: Loss | None, outputs: Outputs
) -> Step:
    """The step of a batch."""
    try:
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
        time_limit: float = 60,
        most: int = 1 << 20,
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            steps: The steps by batch.
            budget: Bytes for the whole step.
            solver, time_limit, most, progress: As for :func:`max_batch`.
        """
        assert budget.bytes is not None
        self.steps, self.solver, self.time_limit, self.most = steps, solver, time_limit, most
        self.budget_bytes, self.budget_text = budget.bytes, budget.text
        self._progress = progress
        self._max_overhead: float | None = None
        self._reference: float | None = None  # seconds per sample of the largest unplanned batch
        self._schedules: list[np.ndarray] = []
        self._solutions: dict[int, Solution] = {}
        self._fraction = 0.0

    def tell(self, text: str, fraction: float | None = None) -> None:
        """Report progress, which never goes back."""
        self._fraction = max(self._fraction, fraction or 0.0)
        if self._progress is not None:
            self._progress(text, self._fraction)

    def run(self, start: int = 4, max_overhead: float | None = None) -> MaxBatch:
        """Search, confirm, and tell; arguments and errors are those of :func:`max_batch`."""
        self._max_overhead, self._solutions, self._fraction = max_overhead, {}, 0.0
        if len(self.steps.captured) < 2:
            self._capture_two(start)
        self.tell("looking for the largest batch", 0.4)
        unplanned = self._largest_unplanned()
        if unplanned is not None and self.steps.at(unplanned).eager_seconds > 0:
            self._reference = self.steps.at(unplanned).eager_seconds / unplanned
        answer = self._grow_and_bisect(unplanned or 0)
        while True:
            self.tell(f"planning batch {answer}", 0.8)
            known = answer in self.steps.captured
            step = self.steps.capture(answer)
            solution = self._solve(step, self.time_limit)
            if self._allowed(step, solution):
                self._solutions[answer] = solution
                self._schedules.append(solution.schedule)
                larger = self._grow_and_bisect(answer)
                if larger == answer or len(self.steps.captured) >= MOST_CAPTURES:
                    break
                answer = larger
            elif answer == 1:
                raise self._infeasible(step, solution)
            else:
                # Now that the captures surround the answer, what they say of smaller batches is close;
                # where that is not enough, one sample less is.
                self._solutions.pop(answer, None)
                answer = max(1, answer - 1 if known else self._bisect(0, answer))
        return self._result(answer, unplanned)

    # ---- estimated batches -----------------------------------------------------------------------

    def _capture_two(self, start: int) -> None:
        """One capture, and one near the batch at which the unplanned step should just fit."""
        self.tell(f"batch {start}: capturing", 0.0)
        first = self.steps.capture(start)
        fixed = first.footprint.around(first.footprint.resident.total)
        per_sample = max(first.unplanned_bytes - fixed, 1) / start
        second = int((self.budget_bytes - fixed) / per_sample)
        second = min(max(second, 2 * start), self.most)
        if second == start:
            second = start // 2 if start > 1 else start + 1
        self.tell(f"batch {second}: capturing", 0.2)
        self.steps.capture(second)

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

    def _grow_and_bisect(self, known: int) -> int:
        """The largest batch that fits by estimate, at least `known`; at least 1."""
        low, high = known, max(known + 1, 1)
        step = max(known, 1)
        while high <= self.most and self._fits(high):
            low, high = high, high + step
            step *= 2
        return max(self._bisect(low, min(high, self.most + 1)), 1)

    def _bisect(self, low: int, high: int) -> int:
        """The largest batch below `high` that fits, given that `low` does (0 always does)."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, size: int) -> bool:
        step = self.steps.at(size)
        room = step.room_bytes(self.budget_bytes)
        for schedule in reversed(self._schedules):
            if len(schedule) and _belongs(schedule, step):
                timeline = simulate(step.graph, schedule)
                if timeline.peak_bytes <= room and self._fast_enough(step, timeline.seconds):
                    self.tell(f"batch {size} fits")
                    return True
        solution = self._solve(step, min(QUICK_SECONDS, self.time_limit))
        if not self._allowed(step, solution):
            self.tell(f"batch {size} does not fit")
            return False
        self._schedules.append(solution.schedule)
        self._solutions[size] = solution
        self.tell(f"batch {size} fits")
        return True

    def _solve(self, step: Sized, seconds: float) -> Solution:
        room = step.room_bytes(self.budget_bytes)
        if self.solver != portfolio.NAME:
            return find_solver(self.solver)(step.graph, room, time_limit=seconds)
        known = [s for s in self._schedules[-4:] if _belongs(s, step)]
        return portfolio.solve(step.graph, room, time_limit=seconds, known=known)

    def _allowed(self, step: Sized, solution: Solution) -> bool:
        return solution.feasible and self._fast_enough(step, solution.seconds)

    def _fast_enough(self, step: Sized, seconds: float) -> bool:
        return self._max_overhead is None or self._overhead(step, seconds) <= self._max_overhead

    def _overhead(self, step: Sized, seconds: float) -> float:
        reference = self._reference or step.graph.base_seconds / step.size
        return seconds / step.size / reference - 1 if reference else 0.0

    # ---- the answer --------------------------------------------------------------------------------

    def _point(self, size: int, peak_bytes: int, seconds: float) -> BatchPoint:
        step = self.steps.at(size)
        whole = seconds + step.footprint.optimizer.seconds
        return BatchPoint(
            batch=size,
            total_bytes=step.total_bytes(peak_bytes),
            seconds=whole,
            samples_per_second=size / whole if whole else 0.0,
            overhead=self._overhead(step, seconds),
            captured=size in self.steps.captured,
        )

    def _result(self, answer: int, unplanned: int | None) -> MaxBatch:
        prepared = self.steps.prepared[answer]
        plan = make_plan(prepared, self._solutions[answer], Budget(self.budget_bytes, self.budget_text))
        points = [
            self._point(size, solution.peak_bytes, solution.seconds)
            for size, solution in sorted(self._solutions.items())
            if size <= answer
        ]
        without = None
        if unplanned is not None:
            step = self.steps.at(unplanned)
            without = self._point(unplanned, int(step.eager_bytes.max(initial=0)), step.eager_seconds)
        self.tell("planned", 1.0)
        return MaxBatch(
            batch=answer,
            plan=plan,
            budget_bytes=self.budget_bytes,
            largest=points[-1],
            unplanned=without,
            fastest=max(points, key=lambda point: point.samples_per_second),
            points=points,
            captures=len(self.steps.captured),
        )

    def _infeasible(self, step: Sized, solution: Solution) -> InfeasibleBudget:
        least = step.total_bytes(solution.peak_bytes)
        slow = solution.feasible
        return InfeasibleBudget(
            f"budget {self.budget_text} is {format_bytes(self.budget_bytes)}, "
            + (
                f"which one sample meets only at more than {100 * (self._max_overhead or 0):.0f} % extra time"
                if slow
                else f"but one sample needs at least {format_bytes(least)} ({least:,} bytes)"
            ),
            minimum_bytes=least,
            budget_bytes=self.budget_bytes,
        )


def _belongs(schedule: np.ndarray, step: Sized) -> bool:
    """Whether a schedule can be one of a step's graph; estimated steps share their rows."""
    rows, base = len(step.graph.ops), step.graph.base_length
    return bool(schedule.max(initial=-1) < rows and np.unique(schedule[schedule < base]).size == base)
