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

from planner.costs.step_memory import StepMemoryModel
from planner.planning.prepare import Prepared
from solvers.model.arrays import PerStep
from solvers.model.graph import Graph


@dataclass(frozen=True)
class Sized:
    """A step at one size, captured or estimated.

    Attributes:
        size: The batch, say.
        graph: The problem.
        footprint: What does not depend on the schedule.
        eager_bytes: Live bytes of the unplanned step over its operations, int64.
        eager_final_bytes: What the unplanned step leaves.
        eager_seconds: Its time.
        final_bytes: What a planned step leaves.
    """

    size: int
    graph: Graph
    footprint: StepMemoryModel
    eager_bytes: PerStep
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
            problem.eager.final_bytes,
            problem.eager.seconds,
            problem.final_bytes,
        )

    @property
    def unplanned_bytes(self) -> int:
        """What the device must have for the unplanned step."""
        peak = int(self.eager_bytes.max(initial=0))
        return self.footprint.whole_step(peak, self.eager_final_bytes).total_bytes

    def total_bytes(self, dynamic_peak_bytes: int) -> int:
        """What the device must have for a planned step of a dynamic peak."""
        return self.footprint.whole_step(dynamic_peak_bytes, self.final_bytes).total_bytes

    def room_bytes(self, budget_bytes: int) -> int:
        """The dynamic peak that a budget leaves; nothing where the step cannot fit at all."""
        if self.total_bytes(0) > budget_bytes:
            return 0
        return self.footprint.room_bytes(budget_bytes)

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """What must be the same for one size to say something about another."""
        ops = self.graph.ops
        return (
            self.graph.base_length,
            len(self.graph.values),
            len(self.eager_bytes),
            tuple((op.name, op.inputs, op.outputs) for op in ops),
        )


class SizedSteps:
    """Steps at any size, estimated from those that were captured.

    Attributes:
        captured: The captured steps, by size.
    """

    def __init__(self, capture: Callable[[int], Prepared]) -> None:
        """
        Args:
            capture: Captures the step at a size.
        """
        self._capture = capture
        self.prepared: dict[int, Prepared] = {}
        self.captured: dict[int, Sized] = {}

    def capture(self, size: int) -> Sized:
        """The step at a size, captured if it was not yet."""
        if size not in self.captured:
            prepared = self._capture(size)
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
        replace(a, bytes=whole(a.bytes, b.bytes))
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
    footprint = replace(before, resident=before.resident.model_copy(update={"input_bytes": inputs}))
    eager = first.eager_bytes + (second.eager_bytes - first.eager_bytes) * share
    return Sized(
        size,
        Graph(ops, values, first.graph.base_length),
        footprint,
        np.maximum(np.rint(eager), 0).astype(np.int64),
        whole(first.eager_final_bytes, second.eager_final_bytes),
        affine(first.eager_seconds, second.eager_seconds),
        whole(first.final_bytes, second.final_bytes),
    )
