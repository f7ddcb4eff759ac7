"""The whole training step on its device, and what a budget leaves of it to the schedule.

    total = allocated + libraries + fragmentation reserve + context

*Allocated* is the larger of two peaks: forward and backward (what is resident, and the schedule's own
peak), and the optimizer's step (what is resident, the gradients, outputs that are still held, and the
step's own intermediate results). Libraries (cuBLAS) allocate workspaces once and keep them. The
*fragmentation reserve* is an assumption: a share of the allocated bytes that the caching allocator is
taken to reserve on top. The *context* is gone before the first tensor. A budget bounds the total; on the
CPU the last three are zero.
"""

import math
from dataclasses import dataclass

from planner.costs.devices import Device
from planner.costs.optimizer_step import OptimizerStep
from planner.planfile.schema import Resident, WholeStep


@dataclass(frozen=True)
class StepMemoryModel:
    """What does not depend on the schedule.

    Attributes:
        device: Where the step runs.
        resident: Bytes that are there throughout.
        optimizer: What the optimizer's step takes.
    """

    device: Device
    resident: Resident
    optimizer: OptimizerStep

    def whole_step(self, dynamic_peak_bytes: int, final_bytes: int) -> WholeStep:
        """The whole step of a schedule.

        Args:
            dynamic_peak_bytes: The most that forward and backward hold over entry.
            final_bytes: What they leave: gradients, outputs.
        """
        forward_backward = self.resident.total + dynamic_peak_bytes
        update = self.resident.total + final_bytes + self.optimizer.transient_bytes
        allocated = max(forward_backward, update)
        return WholeStep(
            forward_backward_bytes=forward_backward,
            optimizer_step_bytes=update,
            allocated_bytes=allocated,
            library_bytes=self.device.library_bytes,
            fragmentation_bytes=self._fragmentation(allocated),
            context_bytes=self.device.context_bytes,
        )

    def room_bytes(self, budget_bytes: int) -> int:
        """The dynamic peak that a budget for the whole step leaves to forward and backward."""
        most = budget_bytes - self.device.context_bytes - self.device.library_bytes
        allocated = int(most / (1 + self.device.fragmentation)) if most > 0 else 0
        # Rounding may put the quotient a byte or two off.
        while allocated > 0 and allocated + self._fragmentation(allocated) > most:
            allocated -= 1
        while allocated + 1 + self._fragmentation(allocated + 1) <= most:
            allocated += 1
        return max(allocated - self.resident.total, 0)

    def around(self, allocated: int) -> int:
        """What a step that allocates so much takes of its device in all."""
        return (
            allocated + self._fragmentation(allocated) + self.device.library_bytes + self.device.context_bytes
        )

    def _fragmentation(self, allocated: int) -> int:
        return math.ceil(allocated * self.device.fragmentation)
