"""A plan's schedule for a step that was captured again, at other shapes perhaps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.capture.captured_step import CapturedStep
from planner.errors import PlanMismatch
from planner.graph.joint_graph import JointGraph
from planner.planfile.plan import GraphRecord, PlanRecord
from planner.planning.prepared import Prepared
from planner.planning.split import split_as
from planner.problem.build import Problem
from planner.problem.encodings import Name, packed_as
from planner.problem.link import with_waits
from planner.runtime.remap import remap_schedule
from solvers.model.arrays import Schedule
from solvers.model.indices import BaseOp, RowId, numbered

_Decided = tuple[Sequence[int], Sequence[int], Mapping[int, int]]
"""The operations that a backward runs, those of them that unpack bits, and for each result on the host the
operation after which it has arrived."""


def schedule_at(plan: PlanRecord, prepared: Prepared) -> tuple[Prepared, Schedule]:
    """A plan's schedule in the problem of another capture of the step.

    Returns:
        The step with the masks packed that the plan packs, and the schedule of its problem.

    Raises:
        PlanMismatch: The step is made of other graphs than the plan.
    """
    if plan.target.backend == "replay":
        return _replayed_at(plan, prepared)
    prepared = split_as(plan, prepared)
    captured, sources = prepared.captured, prepared.problem.sources
    executions = Counter(graph for graph, _ in {(s.graph, s.instance) for s in sources})
    homes = [i for i, g in enumerate(captured.graphs) if g.joint is not None]
    if len(homes) != len(plan.graphs):
        raise PlanMismatch(f"it is captured as {len(homes)} graphs, the plan has {len(plan.graphs)}")
    decided: list[list[_Decided]] = [[] for _ in captured.graphs]
    for i, graph in zip(homes, plan.graphs, strict=True):
        joint, programs, count = captured.graphs[i].joint, graph.by_execution, executions.get(i, 0)
        assert joint is not None
        decided[i] = [_sequence(programs[min(n, len(programs) - 1)], joint) for n in range(count)]
    masks, completed = set[Name](), dict[Name, Name]()
    for source in sources:
        if source.graph >= 0 and (runs := decided[source.graph]):
            _, packed, later = runs[min(source.instance, len(runs) - 1)]
            name = source.graph, source.instance, source.op
            if source.op in packed:
                masks.add(name)
            if source.op in later:
                completed[name] = source.graph, source.instance, later[source.op]
    made = packed_as(prepared.problem, prepared.packings, masks, completed)
    problem = prepared.problem if made is None else made.problem
    schedule = schedule_of(problem, captured, [[backward for backward, *_ in runs] for runs in decided])
    if made is not None and problem.host_bytes:
        problem = with_waits(prepared.problem, made, schedule)
    return replace(prepared, problem=problem), schedule


def _replayed_at(plan: PlanRecord, prepared: Prepared) -> tuple[Prepared, Schedule]:
    record, graph = plan.graphs[0], prepared.captured.graphs[0].joint
    assert graph is not None
    if [op.name for op in graph.ops] != [op.name for op in record.ops]:
        raise PlanMismatch(
            "its forward takes another path than the plan's, as on another device: plan it for this one"
        )
    masks = {(0, 0, op) for op in record.packed}
    made = packed_as(prepared.problem, prepared.packings, masks)
    problem = prepared.problem if made is None else made.problem
    packing = replace(prepared, problem=problem)
    rows = {source.op: row for row, source in numbered(BaseOp, problem.sources) if source.graph >= 0}
    before: dict[int, list[RowId]] = {}
    waiting: list[RowId] = []
    for op in record.backward:
        if op < graph.forward_length:
            waiting.append(problem.graph.rerun(rows[op]))
        else:
            before[rows[op]], waiting = waiting, []
    schedule: list[RowId] = []
    for row in problem.graph.base_ops:
        schedule += before.get(row, ())
        schedule.append(row)
    return packing, np.array(schedule, dtype=np.int64)


def schedule_of(
    problem: Problem, captured: CapturedStep, sequences: Sequence[Sequence[Sequence[int]]]
) -> Schedule:
    """The schedule that runs given sequences of operations in the backwards of graphs.

    Args:
        problem: The problem.
        captured: The captured step.
        sequences: For each graph, a sequence for each execution; further executions take the last one.
    """
    sources = problem.sources
    rows = {(s.graph, s.instance, s.op): row for row, s in numbered(BaseOp, sources) if s.graph >= 0}
    begun: set[tuple[int, int]] = set()
    schedule: list[RowId] = []
    for row, source in numbered(BaseOp, sources):
        joint = captured.graphs[source.graph].joint if source.graph >= 0 else None
        if joint is None or source.op < joint.forward_length:
            schedule.append(row)
        elif (source.graph, source.instance) not in begun:
            begun.add((source.graph, source.instance))
            of_graph = sequences[source.graph]
            for op in of_graph[min(source.instance, len(of_graph) - 1)]:
                base = rows[source.graph, source.instance, op]
                schedule.append(base if op >= joint.forward_length else problem.graph.rerun(base))
    return np.array(schedule, dtype=np.int64)


def _sequence(record: GraphRecord, joint: JointGraph) -> _Decided:
    same = len(joint.ops) == len(record.ops) and all(
        op.name == known.name for op, known in zip(joint.ops, record.ops, strict=True)
    )
    if same:
        return record.backward, record.packed, record.completed_by(record.forward_length)
    remapped = remap_schedule(record, joint)
    return remapped.backward, remapped.packed, {}
