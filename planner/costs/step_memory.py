"""The memory of the whole training step on its device, and the part that a budget leaves to the schedule.

    total = allocated + libraries + fragmentation + context

*Allocated* is the larger of two peaks: that of forward and backward (resident bytes and the schedule's own
peak), and that of the optimizer's step (resident bytes, the gradients, outputs that are still held, and the
step's own intermediate results). *Libraries* (cuBLAS) allocate workspaces once and keep them. *Fragmentation*
is memory that the caching allocator reserves beyond these: two steps of the training loop run through a
simulation of it (:mod:`planner.allocator`), a planned one with segments that are reserved beforehand, its
*arena*. The *context* takes its memory before the first tensor. A budget bounds the total; on the CPU the
last three are zero.
"""

from dataclasses import dataclass

from planner.allocator.arena import Arena
from planner.allocator.training_loop import EXPANDABLE, Allocations, TrainingLoop, arena_of, reservation
from planner.costs.devices import CUBLAS_THREADS, Device
from planner.costs.optimizer_step import OptimizerStep
from planner.planfile.schema import Resident, WholeStep


@dataclass(frozen=True)
class StepMemoryModel:
    """The part of a step's memory that does not depend on the schedule.

    Attributes:
        device: Where the step runs.
        resident: Bytes that are alive throughout.
        optimizer: Memory and time of the optimizer's step.
        tensors: Bytes of each tensor that is alive throughout, without the optimizer's, in the order in which
            a program makes them.
        reduced_bytes: Bytes of this rank's shards of gradients in the optimizer's step; before that these
            gradients are whole (``resident.unreduced_bytes``).
        recorded_bytes: Where forward and backward are recorded graphs: what these read and write beside the
            step's own. Their pool, as large as the step's peak, stays theirs in the optimizer's step. None
            where nothing is recorded.
    """

    device: Device
    resident: Resident
    optimizer: OptimizerStep
    tensors: tuple[int, ...] = ()
    reduced_bytes: int = 0
    recorded_bytes: int | None = None

    def whole_step(
        self,
        dynamic_peak_bytes: int,
        final_bytes: int,
        allocations: Allocations | None = None,
        *,
        arena_events: int = 0,
    ) -> WholeStep:
        """The whole step of a schedule.

        Args:
            dynamic_peak_bytes: The most that forward and backward hold over entry.
            final_bytes: Bytes that they leave: gradients, outputs.
            allocations: Their allocations, in order, to predict fragmentation in the allocator of a GPU; None
                leaves it out.
            arena_events: The number of events that the search for segments to reserve beforehand simulates;
                0 for a step without such segments.
        """
        recorded = self.recorded_bytes or 0
        forward_backward = self.resident.total + dynamic_peak_bytes
        resident = self.resident.total - self.resident.unreduced_bytes + self.reduced_bytes
        if self.recorded_bytes is not None:
            final_bytes, arena_events = max(final_bytes, dynamic_peak_bytes), 0
        update = resident + final_bytes + self.optimizer.transient_bytes
        allocated = max(forward_backward, update)
        fragmentation, without, expandable = 0, None, None
        made = Arena()
        if allocations is not None and self.device.kind == "cuda":
            used = allocated + self.device.library_bytes + recorded
            loop = self.loop(allocations)
            made = arena_of(loop, arena_events) if arena_events else made
            reserved = reservation(loop).reserved_bytes
            fragmentation = max(reserved - made.saved_bytes - used, 0)
            without = max(reserved - used, 0) if arena_events else None
            expandable = max(reservation(loop, EXPANDABLE).reserved_bytes - used, 0)
        return WholeStep(
            forward_backward_bytes=forward_backward,
            optimizer_step_bytes=update,
            allocated_bytes=allocated,
            recorded_bytes=recorded,
            library_bytes=self.device.library_bytes,
            fragmentation_bytes=fragmentation,
            expandable_fragmentation_bytes=expandable,
            unarranged_fragmentation_bytes=without,
            arena=list(made.segments),
            context_bytes=self.device.context_bytes,
        )

    def loop(self, allocations: Allocations) -> TrainingLoop:
        """The training loop whose forward and backward make these allocations."""
        workspace = -(-self.device.library_bytes // CUBLAS_THREADS)
        return TrainingLoop(
            resident=(*self.tensors, self.recorded_bytes) if self.recorded_bytes else self.tensors,
            step=allocations,
            libraries=(workspace,) * CUBLAS_THREADS,
            making=self.optimizer.making,
            steady=self.optimizer.steady,
        )

    def reserved_bytes(self, allocations: Allocations) -> int:
        """Bytes that the allocator of a GPU reserves for a loop, workspaces of libraries included."""
        return reservation(self.loop(allocations)).reserved_bytes

    def room_bytes(self, budget_bytes: int) -> int:
        """The dynamic peak that a budget for the whole step leaves to forward and backward.

        The allocator is taken to reserve no more than is allocated.
        """
        beside = 0
        if self.recorded_bytes is not None:
            beside = self.recorded_bytes + self.optimizer.transient_bytes
        return max(budget_bytes - self.around(self.resident.total) - beside, 0)

    def around(self, allocated: int) -> int:
        """The device memory of a step that allocates so much, if the allocator reserves no more."""
        return allocated + self.device.library_bytes + self.device.context_bytes
