"""The cost of a schedule: one vectorised walk that gives its timeline, peak and seconds.

A *schedule* is a one-dimensional int64 array of rows of ``graph.ops``: all base rows in captured
order, with re-runs inserted in the backward phase. This simulator is the only memory model there
is: solvers are judged by it, plans store its prediction, and generated code frees as it frees.
"""

from dataclasses import dataclass

import numpy as np

from solvers.model.arrays import (
    InstanceMask,
    Integers,
    PerStep,
    Schedule,
    StepPerInstance,
    Steps,
    ValueIds,
    ValuePerInstance,
)
from solvers.model.graph import Graph, GraphError, Phase
from solvers.model.indices import BaseOp, RowId, Step, listed


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        live_bytes: For each step of the schedule, bytes of the values alive while it runs
            (its outputs included, its workspace not), and of those of other micro-batches, int64.
        step_bytes: ``live_bytes`` plus the workspace of the step, int64.
        peak_bytes: Maximum of ``step_bytes``.
        peak_step: The first step that reaches the peak.
        final_bytes: Bytes that are alive when the schedule has ended (gradients, outputs).
        seconds: Sum over the steps.
    """

    live_bytes: PerStep
    step_bytes: PerStep
    peak_bytes: int
    peak_step: Step
    final_bytes: int
    seconds: float


@dataclass(frozen=True)
class Lifetimes:
    """Every instance of every value in a schedule: value ``value[i]`` is computed at step
    ``start[i]`` and alive up to and including step ``end[i]``; ``used[i]`` is False for an instance
    that is dropped at once. All int64 (``used``: bool), sorted by value, then start."""

    value: ValuePerInstance
    start: StepPerInstance
    end: StepPerInstance
    used: InstanceMask


def lifetimes(graph: Graph, schedule: Schedule) -> Lifetimes:
    """When each instance of each value lives.

    Raises:
        GraphError: If a step uses a value that no earlier step computed.
    """
    schedule = np.asarray(schedule, dtype=np.int64)
    length = len(schedule)
    out_value, out_step = _expand(graph.output_table, schedule)
    in_value, in_step = _expand(graph.input_table, schedule)
    key = out_value * (length + 1) + out_step
    order = np.argsort(key, kind="stable")
    key, value, start = key[order], out_value[order], out_step[order]
    end = start.copy()
    used = np.zeros(len(start), dtype=bool)

    instance = np.searchsorted(key, in_value * (length + 1) + in_step, side="left") - 1
    missing = (instance < 0) | (value[np.maximum(instance, 0)] != in_value)
    if missing.any():
        i = int(np.flatnonzero(missing)[0])
        op = graph.ops[schedule[in_step[i]]]
        raise GraphError(f"step {in_step[i]} ({op.name}) uses value {in_value[i]}, not computed before it")
    np.maximum.at(end, instance, in_step)
    used[instance] = True

    held_value, held_until = graph.held_table
    if len(held_value):
        first_step = np.full(len(graph.ops), -1, dtype=np.int64)
        first_step[schedule[::-1]] = np.arange(length - 1, -1, -1)
        until = first_step[held_until]
        first = np.searchsorted(value, held_value, side="left")
        present = first < len(value)
        present[present] = value[first[present]] == held_value[present]
        np.maximum.at(end, first[present], until[present])
        used[first[present]] = True
    return Lifetimes(value, start, end, used)


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Walk a schedule and account for every byte.

    Args:
        graph: The problem.
        schedule: Rows of ``graph.ops`` in execution order.

    Returns:
        The timeline; cost is O((steps + uses) log) in NumPy, milliseconds for 10,000 operations.

    Raises:
        GraphError: If a step uses a value that no earlier step computed.
    """
    schedule = np.asarray(schedule, dtype=np.int64)
    length = len(schedule)
    if length == 0:
        empty = np.zeros(0, dtype=np.int64)
        return Timeline(empty, empty, 0, Step(0), 0, 0.0)
    lives = lifetimes(graph, schedule)
    size = graph.bytes[lives.value]
    if graph.on_demand.any():
        size = np.where(graph.on_demand[lives.value] & ~lives.used, 0, size)
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, lives.start, size)
    np.subtract.at(change, lives.end + 1, size)
    live = np.cumsum(change[:length])
    if graph.in_flight is not None:
        crossing = crosses(graph, lives)
        sent = np.isin(lives.value, graph.in_flight.sent) & (lives.start < graph.forward_length) & ~crossing
        live = live + graph.in_flight.beside(
            int(size[crossing].sum()), schedule, graph.forward_length, int(size[sent].sum())
        )
    total = live + graph.workspace_bytes[schedule]
    peak_step = Step(int(total.argmax()))
    final = int(size[lives.end == length - 1].sum())
    return Timeline(
        live, total, int(total[peak_step]), peak_step, final, float(graph.seconds[schedule].sum())
    )


def crosses(graph: Graph, lives: Lifetimes) -> InstanceMask:
    """Which instances are alive between the forward and the backward, bool."""
    begin: InstanceMask = (lives.start < graph.forward_length) & (lives.end >= graph.forward_length)
    return begin


def crossing_bytes(graph: Graph, schedule: Schedule) -> int:
    """Bytes that a schedule holds between its forward and its backward."""
    lives = lifetimes(graph, schedule)
    held = crosses(graph, lives) & (~graph.on_demand[lives.value] | lives.used)
    return int(graph.bytes[lives.value[held]].sum())


def alive_at(graph: Graph, schedule: Schedule, step: Step) -> ValueIds:
    """The values alive while ``step`` of the schedule runs, as sorted indices."""
    lives = lifetimes(graph, schedule)
    alive = (lives.start <= step) & (step <= lives.end)
    if graph.on_demand.any():
        alive &= ~graph.on_demand[lives.value] | lives.used
    return np.unique(lives.value[alive])


def check(graph: Graph, schedule: Schedule) -> None:
    """Raise unless the schedule is one that can be executed.

    Raises:
        GraphError: Says which rule is broken: a base op missing or out of order, an input absent,
            a re-run outside the backward region of its graph or of an op that may not be re-run.
    """
    schedule = np.asarray(schedule, dtype=np.int64)
    if len(schedule) and not (schedule.min() >= 0 and schedule.max() < len(graph.ops)):
        raise GraphError(f"schedule names rows outside 0..{len(graph.ops) - 1}")
    expected, base_of = 0, listed(BaseOp, graph.base_of)
    for step, row in enumerate(listed(RowId, schedule)):
        op = graph.ops[row]
        if row == expected < graph.base_length:  # the row after the last base operation is a replay
            expected += 1
            continue
        base = base_of[row]
        if base >= expected:
            raise GraphError(f"step {step} runs row {row} ({op.name}) before base op {expected}")
        if row != graph.rerun(base):
            raise GraphError(f"step {step} re-runs op {base} ({op.name}) in a form that is not its replay")
        if not graph.ops[base].recomputable or graph.ops[base].phase is not Phase.FORWARD:
            raise GraphError(f"step {step} re-runs op {base} ({op.name}), which may not be re-run")
        following = graph.ops[graph.base_ops[expected]] if expected < graph.base_length else None
        if following is None or following.phase is not Phase.BACKWARD:
            raise GraphError(f"step {step} re-runs op {base} ({op.name}) outside the backward phase")
        own, region = graph.ops[base].region, following.region
        if own != region:
            raise GraphError(f"step {step} re-runs op {base} of region {own} in region {region}")
    if expected != graph.base_length:
        raise GraphError(f"schedule ends before base op {expected} of {graph.base_length}")
    lifetimes(graph, schedule)


def _expand(table: tuple[Integers, ValueIds], schedule: Schedule) -> tuple[ValueIds, Steps]:
    """(value, step) of every entry of a ragged table along a schedule."""
    offsets, flat = table
    counts = offsets[schedule + 1] - offsets[schedule]
    steps = np.repeat(np.arange(len(schedule), dtype=np.int64), counts)
    first = np.repeat(offsets[schedule] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    return flat[first + np.arange(len(steps), dtype=np.int64)], steps
