"""The bytes alive at the peak of a plan that is replayed, by why they are there; they add up to the peak."""

from collections import Counter
from typing import Any

import numpy as np

from planner.planning.prepared import Prepared
from planner.replay.capture import ReplayedStep
from planner.replay.problem import ReplayProblem
from planner.replay.repeatable import Repeatable
from solvers.model.arrays import Schedule
from solvers.model.indices import RowId
from solvers.model.schedule import lifetimes, simulate

NAMED = 2
"""How many operators are named of each reason, those of the most bytes."""


def at_peak(prepared: Prepared, schedule: Schedule) -> dict[str, Any]:
    """Divide the bytes at the peak of a replayed plan by why they are there.

    Args:
        prepared: The step, prepared with ``backend="replay"``.
        schedule: A schedule of its problem, in which nothing is packed.

    Returns:
        The operator of the peak as text (``operator``), and its bytes by reason (``bytes``), each with the
        operators that made most of them (``of``). The bytes add up to the peak of the schedule.
    """
    captured, problem = prepared.captured, prepared.problem
    assert isinstance(captured, ReplayedStep)
    assert isinstance(problem, ReplayProblem)
    graph = problem.as_it_runs(schedule).graph
    events, storages = captured.compiled.events, captured.compiled.storages
    why = Repeatable(events, captured.saved)
    event_of = {row: event for event, row in problem.row_of_event.items()}
    storage_of = {
        int(value): storage
        for event, row in problem.row_of_event.items()
        for at in {row, RowId(row + (row in problem.written_over))}  # where the result is there
        for storage, value in zip(events[event].allocates, graph.ops[at].outputs, strict=False)
    }
    timeline, lives = simulate(graph, schedule), lifetimes(graph, schedule)
    step = timeline.peak_step
    rows = [int(row) for row in schedule]
    at = graph.ops[RowId(rows[step])]
    now = next(event_of[row] for row in rows[step:] if row in event_of)
    again = step >= graph.forward_length and graph.base_of[rows[step]] < graph.forward_length
    parts: Counter[str] = Counter()
    named: dict[str, Counter[str]] = {}

    def reason(instance: int, value: int) -> str:
        if graph.on_demand[value]:
            return "states of generators"
        storage = storages[storage_of[value]]
        in_backward = graph.producer[value] >= graph.forward_length
        if value in at.inputs or value in at.outputs:
            return "read or made by the operator"
        if in_backward and storage.died_after is None:
            return "left by the step: gradients"
        if in_backward:
            return f"made in the backward, {'read later' if read_later(value) else 'held by its node'}"
        if lives.start[instance] >= graph.forward_length:
            return "made again"
        if storage.died_after is None:
            return "left by the step: results"
        if storage.died_after >= now:
            return "held by Python, read later" if read_later(value) else "held by Python alone"
        made_by = event_of[int(graph.producer[value])]
        unable = why.why_not(made_by)
        return "kept by the plan" if unable is None else f"not made again: {unable}"

    def read_later(value: int) -> bool:
        return any(step < first[int(reader)] for reader in graph.consumers[value] if int(reader) in first)

    first = {row: i for i, row in reversed(list(enumerate(rows))) if row < graph.base_length}
    for instance in np.flatnonzero((lives.start <= step) & (step <= lives.end)).tolist():
        value = int(lives.value[instance])
        if graph.on_demand[value] and not lives.used[instance]:
            continue
        found = reason(instance, value)
        parts[found] += int(graph.bytes[value])
        made = graph.ops[graph.producer[value]]
        name = f"{made.name.split(' ')[0].removeprefix('aten.')} of {made.module or 'the step'}"
        named.setdefault(found, Counter())[name] += int(graph.bytes[value])
    parts["workspace of the operator"] += int(graph.workspace_bytes[rows[step]])
    assert sum(parts.values()) == timeline.peak_bytes, (parts, timeline.peak_bytes)
    phase = "run again" if again else "backward" if step >= graph.forward_length else "forward"
    return {
        "operator": f"{at.name.split(' ')[0].removeprefix('aten.')} in the {phase}".replace(
            "in the run", "run"
        ),
        "bytes": {found: count for found, count in parts.most_common() if count},
        "of": {found: [name for name, _ in named[found].most_common(NAMED)] for found in named},
    }
