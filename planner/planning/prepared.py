"""A step that is captured and costed, ready to be solved for any number of budgets."""

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
    meter: WorkspaceMeter | None
    costs: Costs
    seconds: float
    options: PlanOptions
    packings: tuple[Packing, ...]
    """The masks that can be kept as bits; with ``offload`` the results that can be kept on the host."""
    state_digest: str
    """Of the model as it was, see :func:`planner.planfile.fingerprint.state_digest`."""
    cuda: CudaKernels | None
    """What CUDA does where the CPU would do something else; None where the device is at hand."""
    regions: tuple[str, ...] = ()
    """Names of the submodules that are graphs of their own."""
    rank: Rank | None = None
    """What the step is one of several ranks'; None for a single process."""
    as_run_bytes: int | None = None
    """What the step allocates as the user runs it, with checkpoints that the plan goes in the place of;
    percentages are of these. None where there are none."""
    emitted_models: "dict[Any, EmittedStepModel]" = field(default_factory=dict, compare=False)
    """What says what schedules take under Inductor, by its options: each is lowered once for all budgets."""

    @property
    def resident(self) -> Resident:
        """Bytes that are there throughout."""
        return self.footprint.resident

    @property
    def device(self) -> Device:
        """Where the step will run."""
        return self.footprint.device

    @property
    def _unrecorded(self) -> StepMemoryModel:
        """The memory around the unplanned step."""
        return replace(self.footprint, recorded_bytes=None)

    @cached_property
    def baseline_whole_step(self) -> WholeStep:
        """The unplanned step with the optimizer's own."""
        eager = self.problem.eager
        return self._unrecorded.whole_step(eager.peak_bytes, eager.final_bytes, eager.allocations)

    @cached_property
    def reserving_whole_step(self) -> WholeStep:
        """The unplanned step with segments reserved for it beforehand."""
        eager = self.problem.eager
        return self._unrecorded.whole_step(
            eager.peak_bytes, eager.final_bytes, eager.allocations, arena=MOST_EVENTS
        )

    def whole_step(self, schedule: Schedule, arena: int = MOST_EVENTS) -> WholeStep:
        """The step by a schedule, with the optimizer's own; ``arena`` as of
        :meth:`planner.costs.step_memory.StepMemoryModel.whole_step`."""
        problem = self.problem
        peak = simulate(problem.graph, schedule).peak_bytes
        allocations = planned_allocations(problem.graph, schedule) if self.device.kind == "cuda" else None
        return self.footprint.whole_step(peak, problem.final_bytes, allocations, arena=arena)

    def changed(self, change: Callable[[torch.nn.Module], object]) -> tuple[EagerTimeline, WholeStep]:
        """The unplanned step of a copy of the model that is changed before, as by checkpoints.

        Raises:
            CaptureError: It cannot be run so.
        """
        options = self.options
        recording = record_eagerly(
            self.model, self.step, change, cuda=self.cuda, accumulate=options.accumulate, rank=self.rank
        )
        line = eager_timeline(recording, self.device, self.meter, self.costs)
        return line, self._unrecorded.whole_step(line.peak_bytes, line.final_bytes, line.allocations)

    def budget(self, value: int | str) -> Budget:
        """Read a budget; percentages are of the unplanned step's allocated bytes, and bound allocated bytes.

        Raises:
            BudgetError: The budget cannot be read.
        """
        now = self.baseline_whole_step.allocated_bytes if self.as_run_bytes is None else self.as_run_bytes
        wanted = parse_budget(value, now)
        if wanted.bytes is None or not wanted.relative:
            return wanted
        return replace(wanted, bytes=self.footprint.around(wanted.bytes))
