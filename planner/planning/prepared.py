"""The result of :func:`planner.planning.prepare.prepare`: a step captured, with its costs and its problem."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from planner.allocator.arena import MOST_EVENTS
from planner.capture.capture import record_eagerly
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.costs.devices import Device
from planner.costs.eager_timeline import EagerTimeline, eager_timeline
from planner.costs.roofline import Costs
from planner.costs.step_memory import StepMemoryModel
from planner.costs.workspace import WorkspaceMeter
from planner.parallel.rank import Rank
from planner.planfile.budget import Budget, parse_budget
from planner.planfile.plan import (
    Resident,
    WholeStep,
)
from planner.planning.options import PlanOptions
from planner.problem.allocations import planned_allocations
from planner.problem.build import Problem
from planner.problem.encodings import Packing
from planner.training_step.step import Step
from solvers.model.arrays import Schedule
from solvers.model.schedule import simulate

if TYPE_CHECKING:
    from planner.problem.emitted_step import EmittedStepModel  # which imports Inductor


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to be solved, for any number of budgets."""

    model: torch.nn.Module
    step: Step
    captured: CapturedStep
    problem: Problem
    footprint: StepMemoryModel
    """The memory around forward and backward: all that no schedule changes."""
    meter: WorkspaceMeter | None
    """Measures the workspace of operations; None if the device is not at hand."""
    costs: Costs
    """The source of the seconds of operations."""
    seconds: float
    """Wall time that capturing the step and building the problem took."""
    options: PlanOptions
    packings: tuple[Packing, ...]
    """The masks that can be kept as bits; with ``offload`` the results that can be kept on the host."""
    state_digest: str
    """Digest of the model before planning, see :func:`planner.planfile.fingerprint.state_digest`."""
    cuda: CudaKernels | None
    """The behaviour of a GPU that is planned for on another machine; None if the device is at hand."""
    regions: tuple[str, ...] = ()
    """Names of the submodules that are graphs of their own."""
    rank: Rank | None = None
    """The rank that runs the step, of several; None for a single process."""
    as_run_bytes: int | None = None
    """Bytes that the step allocates with the user's own checkpoints, which the plan replaces. Budgets in
    percent are of these; None if there are no such checkpoints."""
    emitted_models: "dict[Any, EmittedStepModel]" = field(default_factory=dict, compare=False)
    """By Inductor's options: the model that predicts the memory of a schedule. One serves all budgets."""

    @property
    def resident(self) -> Resident:
        """Bytes that are there throughout the step."""
        return self.footprint.resident

    @property
    def device(self) -> Device:
        """Where the step will run."""
        return self.footprint.device

    @property
    def _unrecorded(self) -> StepMemoryModel:
        """The memory around the unplanned step, which runs as no recorded CUDA graph."""
        return replace(self.footprint, recorded_bytes=None)

    @cached_property
    def baseline_whole_step(self) -> WholeStep:
        """The unplanned step, then the optimizer's."""
        eager = self.problem.eager
        return self._unrecorded.whole_step(eager.peak_bytes, eager.final_bytes, eager.allocations)

    @cached_property
    def reserving_whole_step(self) -> WholeStep:
        """The same, with the best arena of segments that could be reserved for it beforehand."""
        eager = self.problem.eager
        return self._unrecorded.whole_step(
            eager.peak_bytes, eager.final_bytes, eager.allocations, arena_events=MOST_EVENTS
        )

    def whole_step(self, schedule: Schedule, arena_events: int = MOST_EVENTS) -> WholeStep:
        """The step by a schedule, then the optimizer's; ``arena_events`` as for
        :meth:`planner.costs.step_memory.StepMemoryModel.whole_step`."""
        problem = self.problem
        peak = simulate(problem.graph, schedule).peak_bytes
        allocations = planned_allocations(problem.graph, schedule) if self.device.kind == "cuda" else None
        return self.footprint.whole_step(peak, problem.final_bytes, allocations, arena_events=arena_events)

    def changed(self, change: Callable[[torch.nn.Module], object]) -> tuple[EagerTimeline, WholeStep]:
        """Record the unplanned step of a changed copy of the model.

        Args:
            change: Changes the copy, as by placing checkpoints.

        Raises:
            CaptureError: The changed copy cannot be run.
        """
        options = self.options
        recording = record_eagerly(
            self.model, self.step, change, cuda=self.cuda, accumulate=options.accumulate, rank=self.rank
        )
        line = eager_timeline(recording, self.device, self.meter, self.costs)
        return line, self._unrecorded.whole_step(line.peak_bytes, line.final_bytes, line.allocations)

    def budget(self, value: int | str) -> Budget:
        """Read a budget. One in percent is of the bytes that the step allocates now, and bounds allocated
        bytes; the result also counts what the device holds beside these.

        Raises:
            BudgetError: The budget cannot be read.
        """
        now = self.baseline_whole_step.allocated_bytes if self.as_run_bytes is None else self.as_run_bytes
        wanted = parse_budget(value, now)
        if wanted.bytes is None or not wanted.relative:
            return wanted
        return replace(wanted, bytes=self.footprint.around(wanted.bytes))
