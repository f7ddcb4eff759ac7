"""A training step at sizes that were not captured, from sizes that were.

Between batches (sequence lengths, image sizes) a step usually keeps its operations and only its tensors
grow. Then every byte and second is, near enough, affine in the size: of two captures the graph at any size
follows without capturing. Bytes that grow otherwise (attention matrices with the sequence length) make the
estimate worse with the distance; whoever uses it captures at its answer and asks again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.allocator.arena import MOST_EVENTS
from planner.allocator.training_loop import Allocations
from planner.costs.step_memory import StepMemoryModel
from planner.planfile.schema import WholeStep
from planner.planning.prepared import Prepared
from planner.problem.allocations import planned_allocations
from solvers.model.arrays import PerStep, Schedule
from solvers.model.graph import Graph
from solvers.model.schedule import simulate


@dataclass(frozen=True)
class Sized:
    """A step at one size, captured or estimated.

    Attributes:
        size: The batch, say.
        graph: The problem.
        footprint: The memory that does not depend on the schedule.
        eager_bytes: Live bytes of the unplanned step over its operations, int64.
        eager_allocations: The blocks that it allocates, in order.
        eager_final_bytes: Bytes that the unplanned step leaves.
        eager_seconds: Its seconds.
        final_bytes: Bytes that a planned step leaves.
    """

    size: int
    graph: Graph
    footprint: StepMemoryModel
    eager_bytes: PerStep
    eager_allocations: Allocations
    eager_final_bytes: int
    eager_seconds: float
    final_bytes: int

    @classmethod
    def captured(cls, size: int, prepared: Prepared) -> "Sized":
        """The step as it was captured at a size."""
        problem = prepared.problem
        return cls(
            size,
            problem.graph,
            prepared.footprint,
            problem.eager.step_bytes,
            problem.eager.allocations,
            problem.eager.final_bytes,
            problem.eager.seconds,
            problem.final_bytes,
        )

    @cached_property
    def unplanned(self) -> WholeStep:
        """The unplanned step with the optimizer's own."""
        peak = int(self.eager_bytes.max(initial=0))
        return self.footprint.whole_step(peak, self.eager_final_bytes, self.eager_allocations)

    @property
    def unplanned_bytes(self) -> int:
        """Bytes that the device must have for the unplanned step."""
        return self.unplanned.total_bytes

    def whole_step(self, schedule: Schedule) -> WholeStep:
        """The step by a schedule, with the optimizer's own."""
        key = schedule.tobytes()
        if key not in self._whole_steps:
            peak = simulate(self.graph, schedule).peak_bytes
            on_gpu = self.footprint.device.kind == "cuda"
            allocations = planned_allocations(self.graph, schedule) if on_gpu else None
            self._whole_steps[key] = self.footprint.whole_step(
                peak, self.final_bytes, allocations, arena_events=MOST_EVENTS
            )
        return self._whole_steps[key]

    def total_bytes(self, schedule: Schedule) -> int:
        """Bytes that the device must have for the step by a schedule."""
        return self.whole_step(schedule).total_bytes

    @cached_property
    def _whole_steps(self) -> dict[bytes, WholeStep]:
        return {}

    def room_bytes(self, budget_bytes: int) -> int:
        """The dynamic peak that a budget leaves if no more is reserved than is allocated; 0 if the step
        cannot fit at all."""
        if self.footprint.whole_step(0, self.final_bytes).total_bytes > budget_bytes:
            return 0
        return self.footprint.room_bytes(budget_bytes)

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """The facts that two sizes must share, so that one can be estimated from the other."""
        ops = self.graph.ops
        return (
            self.graph.base_length,
            len(self.graph.values),
            len(self.eager_bytes),
            len(self.eager_allocations.bytes),
            tuple((op.name, op.inputs, op.outputs) for op in ops),
        )


class SizedSteps:
    """Steps at any size, estimated from those that were captured.

    Attributes:
        captured: The captured steps, by size.
    """

    def __init__(self, capture: Callable[[int, Prepared | None], Prepared]) -> None:
        """
        Args:
            capture: Captures the step at a size, given one of another size where there is one.
        """
        self._capture = capture
        self.prepared: dict[int, Prepared] = {}
        self.captured: dict[int, Sized] = {}

    def capture(self, size: int) -> Sized:
        """The step at a size, captured if it was not yet."""
        if size not in self.captured:
            prepared = self._capture(size, next(iter(self.prepared.values()), None))
            self.prepared[size] = prepared
            self.captured[size] = Sized.captured(size, prepared)
        return self.captured[size]

    def at(self, size: int) -> Sized:
        """The step at a size: captured if it was, estimated from the two nearest captures that look
        alike if there are such, and captured otherwise."""
        if size in self.captured:
            return self.captured[size]
        nearest = sorted(self.captured.values(), key=lambda sized: abs(sized.size - size))
        for i, first in enumerate(nearest):
            for second in nearest[i + 1 :]:
                if first.structure == second.structure:
                    return _between(first, second, size)
        return self.capture(size)


def _between(first: Sized, second: Sized, size: int) -> Sized:
    share = (size - first.size) / (second.size - first.size)

    def affine(a: float, b: float) -> float:
        return max(a + (b - a) * share, 0.0)

    def whole(a: int, b: int) -> int:
        return round(affine(a, b))

    values = tuple(
        a._replace(bytes=whole(a.bytes, b.bytes))
        for a, b in zip(first.graph.values, second.graph.values, strict=True)
    )
    ops = tuple(
        replace(
            a,
            seconds=affine(a.seconds, b.seconds),
            workspace_bytes=whole(a.workspace_bytes, b.workspace_bytes),
        )
        for a, b in zip(first.graph.ops, second.graph.ops, strict=True)
    )
    before, after = first.footprint, second.footprint
    inputs = whole(before.resident.input_bytes, after.resident.input_bytes)
    tensors = before.tensors
    if len(tensors) == len(after.tensors):
        tensors = tuple(whole(a, b) for a, b in zip(tensors, after.tensors, strict=True))
    resident = before.resident.model_copy(update={"input_bytes": inputs})
    footprint = replace(before, resident=resident, tensors=tensors)
    eager = first.eager_bytes + (second.eager_bytes - first.eager_bytes) * share
    return Sized(
        size,
        Graph(ops, values, first.graph.base_length),
        footprint,
        np.maximum(np.rint(eager), 0).astype(np.int64),
        first.eager_allocations.between(second.eager_allocations, share),
        whole(first.eager_final_bytes, second.eager_final_bytes),
        affine(first.eager_seconds, second.eager_seconds),
        whole(first.final_bytes, second.final_bytes),
    )
