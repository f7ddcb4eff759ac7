"""The result of :func:`planner.planning.prepare.prepare`: a step captured, with its costs and its problem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from planner._torch import fake
from planner.allocator.arena import MOST_EVENTS
from planner.capture.capture import record_eagerly
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.costs.devices import Device, round_bytes
from planner.costs.eager_timeline import EagerTimeline, eager_timeline
from planner.costs.optimizer_step import OptimizerStep
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
from planner.training_step.step import Step, unique_storages
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


@dataclass(frozen=True)
class ThroughoutBytes:
    """Bytes of each storage that is there throughout, in the order in which a training loop makes them.

    The device's allocator has not rounded them up.

    Attributes:
        parameters, buffers, inputs: What the step is given.
        buckets: Those of ``DistributedDataParallel``, without the parts that are gradients at the same time.
        unreduced: Whole gradients that ``fully_shard`` keeps between micro-batches.
        gradients: Those that are there when the step begins.
    """

    parameters: Sequence[int]
    buffers: Sequence[int]
    buckets: Sequence[int]
    unreduced: Sequence[int]
    gradients: Sequence[int]
    inputs: Sequence[int]

    def resident(self, update: OptimizerStep, device: Device) -> Resident:
        """The sum of each, rounded up, and the bytes of an optimizer's state."""

        def total(sizes: Sequence[int]) -> int:
            return sum(round_bytes(device, size) for size in sizes)

        return Resident(
            parameter_bytes=total(self.parameters),
            buffer_bytes=total(self.buffers),
            input_bytes=total(self.inputs),
            gradient_bytes=total(self.gradients),
            optimizer_bytes=update.state_bytes,
            bucket_bytes=total(self.buckets),
            unreduced_bytes=total(self.unreduced),
        )

    def tensors(self, device: Device) -> tuple[int, ...]:
        """The bytes of each, rounded up, in order."""
        gradients = [*self.buckets, *self.unreduced, *self.gradients]
        sizes = [*self.parameters, *self.buffers, *gradients, *self.inputs]
        return tuple(round_bytes(device, size) for size in sizes)


def bytes_throughout(
    captured: CapturedStep,
    rank: Rank | None,
    parameters: Sequence[torch.Tensor],
    added_to: Sequence[bool],
    in_flight: int | None = None,
) -> ThroughoutBytes:
    """The bytes that are there throughout a captured step.

    Args:
        captured: The step.
        rank: The rank whose step it is; None for a single process.
        parameters: The parameters of its module.
        added_to: Whether each of these has a gradient when the step begins.
        in_flight: In a stage of a pipeline, the number of micro-batches whose forward has run when the first
            backward begins; else None.
    """

    def sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
        return [int(t.untyped_storage().nbytes()) for t in unique_storages(tensors)]

    buffers, inputs = sizes(captured.buffers), sizes(captured.inputs)
    if in_flight is not None:  # each has inputs of its own, and memory for the gradients that it is sent
        inputs = [*inputs, *(t.numel() * t.element_size() for t in captured.arriving)] * in_flight
    if rank is None:
        return ThroughoutBytes(sizes(captured.parameters), buffers, (), (), sizes(captured.gradients), inputs)
    return ThroughoutBytes(
        rank.parameter_bytes(parameters),
        buffers,
        rank.bucket_bytes(parameters, added_to),
        rank.unreduced_bytes(parameters),
        rank.gradient_bytes(parameters, added_to),
        inputs,
    )


def recorded_bytes(
    captured: CapturedStep, problem: Problem, resident: Resident, device: Device, *, dropped: bool
) -> int:
    """The bytes that recorded graphs read and write at fixed addresses, beside a step's own tensors.

    Args:
        captured, problem: The step.
        resident: The bytes that are there throughout.
        device: The device that the step runs on.
        dropped: Whether the step drops its outputs.
    """
    graphs = [graph.joint for graph in captured.graphs if graph.joint is not None]
    outputs = [
        round_bytes(device, fake.storage_bytes(node.meta["val"]))
        for joint in graphs
        for node in dict.fromkeys(joint.outputs[0])
        if isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    # Each output is copied to be handed out, and its gradient when it arrives. Where the step drops its
    # outputs, those that the graphs wrote stay all the same. If another graph reads them, it reads a copy,
    # and the gradient that it returns is copied.
    copies = 2 + dropped + 2 * (len(graphs) > 1)
    # Each graph has a pool. The step's peak, which is counted elsewhere, is at least the largest of them.
    pools = sorted(problem.peaks_by_graph().values())
    inputs = len(graphs) * resident.input_bytes
    # Gradients that are there at entry are added to, so the graphs hand out copies of those that they make.
    return inputs + copies * sum(outputs) + sum(pools[:-1]) + resident.gradient_bytes + device.library_bytes
