"""The records of a step's graphs in its plan: their operations, and how each of their executions runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.capture.captured_step import CapturedGraph, CapturedStep
from planner.lowering.partition import no_recomputation
from planner.planfile.plan import (
    GradientLayout,
    GraphRecord,
    OpRecord,
    Program,
    SplitRecord,
    SplitRun,
    ViewsRecord,
)
from planner.problem.build import Problem
from solvers.model import indices
from solvers.model.schedule import lifetimes
from solvers.model.solution import Solution


def graph_records(captured: CapturedStep, problem: Problem, solution: Solution) -> list[GraphRecord]:
    """A record for each graph that has a backward, in the order of the step."""
    sequences = problem.backward_sequences(captured, solution.schedule)
    cost: dict[tuple[int, int], float] = {}
    size: dict[tuple[int, int], int] = {}
    for row, source in indices.numbered(indices.BaseOp, problem.sources):
        key = (source.graph, source.op)
        if source.graph >= 0 and key not in cost:  # alike in all executions
            cost[key] = problem.graph.ops[row].seconds
            outputs = problem.graph.ops[row].outputs
            size[key] = sum(
                problem.graph.values[v].bytes for v in outputs if not problem.graph.values[v].on_demand
            )
    kept = _kept(problem, solution)
    packed: dict[tuple[int, int], list[int]] = {}
    completed: dict[tuple[int, int], list[int]] = {}
    joints = {i: g.joint for i, g in enumerate(captured.graphs) if g.joint is not None}
    for mask in sorted(problem.packed, key=lambda source: source.op):
        packed.setdefault((mask.graph, mask.instance), []).append(mask.op)
        if problem.host_bytes and mask.op < joints[mask.graph].forward_length:
            last = problem.completed.get(mask, mask)
            completed.setdefault((mask.graph, mask.instance), []).append(last.op)
    records = []
    for index, (captured_graph, executions) in enumerate(zip(captured.graphs, sequences, strict=True)):
        joint = captured_graph.joint
        if joint is None:
            continue
        # One that the recorded step did not run has no execution there.
        decided = [
            (tuple(b), tuple(packed.get((index, n), ())), tuple(completed.get((index, n), ())))
            for n, b in enumerate(executions)
        ]
        found = {execution: n for n, execution in reversed(list(enumerate(decided)))}
        programs = [
            Program(
                backward=list(backward),
                packed=list(masks),
                completed=list(later),
                kept=kept.get((index, n), []),
            )
            for (backward, masks, later), n in sorted(found.items(), key=lambda item: item[1])
        ] or [Program(backward=no_recomputation(joint))]
        numbers = {
            (tuple(p.backward), tuple(p.packed), tuple(p.completed)): n for n, p in enumerate(programs)
        }
        ops = [
            OpRecord(
                name=op.name,
                module=op.module,
                bytes=size.get((index, op.index), 0),
                phase="backward" if op.backward else "forward",
                seconds=cost.get((index, op.index), 0.0),
            )
            for op in joint.ops
        ]
        records.append(
            GraphRecord(
                fingerprint=joint.fingerprint,
                structure=captured_graph.structure,
                occurrence=captured_graph.occurrence,
                occurrences=captured_graph.occurrences,
                unused_outputs=list(captured_graph.spec.unused_outputs),
                per_use_inputs=sorted(captured_graph.spec.per_use_inputs),
                handed_inputs=sorted(captured_graph.spec.handed_inputs),
                gradient_layouts=[
                    GradientLayout(
                        output=output,
                        dimensions=list(layout.dimensions),
                        inside=list(layout.inside),
                        step=layout.step,
                    )
                    for output, layout in sorted(captured_graph.spec.tangent_layouts.items())
                ],
                split=_split_record(captured_graph),
                ops=ops,
                backward=programs[0].backward,
                packed=programs[0].packed,
                completed=programs[0].completed,
                kept=programs[0].kept,
                other_programs=programs[1:],
                executions=[numbers[execution] for execution in decided] or [0],
            )
        )
    return records


def _split_record(graph: CapturedGraph) -> SplitRecord | None:
    split = graph.spec.split
    if split is None:
        return None
    runs = [SplitRun(module=module, rows=rows) for module, rows in graph.split_runs]
    return SplitRecord(form=split.form, pieces=split.pieces, what=split.what, runs=runs)


def _kept(problem: Problem, solution: Solution) -> dict[tuple[int, int], list[int]]:
    """For each execution of each captured graph the forward operations whose results live on into the
    backward."""
    graph = problem.graph
    lives = lifetimes(graph, solution.schedule)
    first = np.append(True, lives.value[1:] != lives.value[:-1])
    outlive = first & (lives.start < graph.forward_length) & (lives.end >= graph.forward_length)
    kept: dict[tuple[int, int], set[int]] = {}
    for value in lives.value[outlive].tolist():
        source = problem.sources[int(graph.producer[value])]
        if source.graph >= 0:
            kept.setdefault((source.graph, source.instance), set()).add(source.op)
    return {execution: sorted(ops) for execution, ops in kept.items()}


def forward_only(captured: CapturedStep) -> list[str]:
    """Structures of graphs at whose outputs no gradient arrives."""
    found = {g.structure for g in captured.graphs if g.joint is None and g.occurrences}
    return sorted(found - {g.structure for g in captured.graphs if g.passes_gradients})


def views_records(captured: CapturedStep) -> list[ViewsRecord]:
    """The graphs at whose outputs gradients arrive that go on to their inputs as they are, and that have
    others, or have the structure of graphs with a schedule."""
    scheduled = {graph.structure for graph in captured.graphs if graph.joint is not None}
    return [
        ViewsRecord(
            structure=graph.structure,
            occurrence=graph.occurrence,
            occurrences=graph.occurrences,
            unused_outputs=list(graph.spec.unused_outputs),
        )
        for graph in captured.graphs
        if graph.joint is None and graph.passes_gradients and graph.occurrences
        if graph.spec.unused_outputs or graph.structure in scheduled
    ]


def with_digests(
    records: Sequence[GraphRecord],
    captured: CapturedStep,
    digests: Mapping[tuple[int, tuple[int, ...]], tuple[str, str]],
) -> list[GraphRecord]:
    """Records that say which programs of Inductor were planned."""
    indices = [i for i, graph in enumerate(captured.graphs) if graph.joint is not None]

    def identified(graph: int, program: Program) -> Any:
        found = digests.get((graph, tuple(program.backward)), ())
        return program.model_copy(update={"emitted": list(found)})

    return [
        identified(graph, record).model_copy(
            update={"other_programs": [identified(graph, program) for program in record.other_programs]}
        )
        for graph, record in zip(indices, records, strict=True)
    ]
