"""The bytes alive at a plan's peak, and how many of them no plan can drop."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.planfile.simulated import SimulatedPlan
from solvers.model.arrays import ValueIds
from solvers.model.indices import RowId
from solvers.model.schedule import alive_at


@dataclass(frozen=True)
class PeakParts:
    """Bytes at the peak; the parts add up to it.

    Attributes:
        total_bytes: The dynamic peak.
        operand_bytes: Inputs, outputs and workspace of the operation that runs then; 0 where that is a
            recomputation, which another plan need not do.
        backward_bytes: Other results of the backward that are still needed: gradients, mostly.
        held_bytes: Other results of the forward that are held from outside, that the rest of the forward
            needs, or that are needed later and cannot be recomputed.
        kept_bytes: Results that another plan could drop and recompute.
    """

    total_bytes: int
    operand_bytes: int
    backward_bytes: int
    held_bytes: int
    kept_bytes: int

    @property
    def undroppable_bytes(self) -> int:
        """Bytes that every plan holds at that operation of the step."""
        return self.operand_bytes + self.backward_bytes + self.held_bytes


def peak_parts(sim: SimulatedPlan) -> PeakParts:
    """Divide the bytes alive at a plan's peak by whether every plan holds them or one could drop them."""
    graph, step = sim.graph, sim.timeline.peak_step
    row, again = RowId(int(sim.schedule[step])), bool(sim.reruns[step])
    alive = alive_at(graph, sim.schedule, step)
    operands = np.zeros(len(alive), dtype=bool)
    if not again:
        operands = np.isin(alive, [*graph.ops[row].inputs, *graph.ops[row].outputs])
    needed = _needed(sim, alive) & ~operands
    backward = needed & (graph.producer[alive] >= graph.forward_length)
    size = graph.bytes[alive]
    workspace = int(graph.workspace_bytes[row])
    return PeakParts(
        total_bytes=sim.timeline.peak_bytes,
        operand_bytes=int(size[operands].sum()) + (0 if again else workspace),
        backward_bytes=int(size[backward].sum()),
        held_bytes=int(size[needed & ~backward].sum()),
        kept_bytes=int(size[~operands & ~needed].sum()) + (workspace if again else 0),
    )


def droppable(sim: SimulatedPlan) -> ValueIds:
    """The results that are alive at a plan's peak and that another plan could drop and recompute."""
    row = sim.graph.ops[RowId(int(sim.schedule[sim.timeline.peak_step]))]
    alive = alive_at(sim.graph, sim.schedule, sim.timeline.peak_step)
    used_now = np.isin(alive, [*row.inputs, *row.outputs])
    return alive[~_needed(sim, alive) & ~used_now]


def _needed(sim: SimulatedPlan, values: ValueIds) -> NDArray[np.bool_]:
    """Which values every plan holds at its peak.

    These are held from outside, or an operation of the step itself reads them later and they cannot be made
    again before it.
    """
    graph, step = sim.graph, sim.timeline.peak_step
    forward = graph.forward_length
    first_step = np.full(len(graph.ops), -1, dtype=np.int64)
    first_step[sim.schedule[::-1]] = np.arange(len(sim.schedule) - 1, -1, -1)
    until = {int(v): int(first_step[op]) for v, op in zip(*graph.held_table, strict=True)}
    # The step's own operation at the peak; at a recomputation the next one.
    now = int((~sim.reruns[:step]).sum())
    end = forward if now < forward else graph.base_length
    return np.array(
        [
            until.get(v, -1) >= step
            or (
                (now < forward or graph.recompute_row[v] < 0)
                and any(now <= reader < end for reader in graph.consumers[v])
            )
            for v in values.tolist()
        ],
        dtype=bool,
    )
