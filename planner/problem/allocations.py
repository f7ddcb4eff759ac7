"""The allocations of a schedule, in order."""

import numpy as np

from planner.allocator.training_loop import Allocations, step_allocations
from solvers.model.arrays import Schedule
from solvers.model.graph import Graph
from solvers.model.schedule import lifetimes


def planned_allocations(graph: Graph, schedule: Schedule) -> Allocations:
    """The allocations of a step that runs by a schedule, at the sizes and in the order of the simulator."""
    lives = lifetimes(graph, schedule)
    allocated = graph.bytes[lives.value] > 0
    allocated &= ~graph.on_demand[lives.value] | lives.used
    value, start, end = lives.value[allocated], lives.start[allocated], lives.end[allocated]
    # An operation makes its outputs in their order, and values are numbered in that order.
    made_by = graph.producer[value].tolist()
    last = len(schedule) - 1
    return step_allocations(
        start=start,
        end=np.where(end == last, len(schedule), end),  # gradients and outputs, which the step leaves
        sizes=graph.bytes[value],
        workspace=graph.workspace_bytes[schedule],
        names=[f"{graph.ops[op].name} @ {graph.ops[op].module}" for op in made_by],
        backward_from=graph.forward_length,
        seconds=graph.seconds[schedule].tolist(),
        operations=[f"{graph.ops[row].name} @ {graph.ops[row].module}" for row in schedule.tolist()],
    )
