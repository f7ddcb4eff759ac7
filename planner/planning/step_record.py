"""The solvers' graph of a step as plan files store it."""

from collections.abc import Sequence

import numpy as np

from planner.capture.captured_step import CapturedStep
from planner.planfile.graph_record import OpRecord
from planner.planfile.schema import shortened
from planner.planfile.step_record import StepRecord
from planner.problem.build import Problem
from planner.training_step.user_lines import short_line
from solvers.model.arrays import Integers
from solvers.model.graph import Graph, Op, Phase


def step_record(captured: CapturedStep, problem: Problem) -> StepRecord:
    """What each operation of the step reads and makes, and the line of the model's code it comes from."""
    graph = problem.graph
    base, forms = graph.ops[: graph.base_length], graph.ops[graph.base_length :]
    made = [v for op in base for v in op.outputs]
    # By the order of production, so that counts say which they are.
    number = np.full(len(graph.values), -1, dtype=np.int64)
    number[made] = np.arange(len(made))
    values = [graph.values[v] for v in made]
    planned = [i for i, g in enumerate(captured.graphs) if g.joint is not None]
    position = {graph_index: i for i, graph_index in enumerate(planned)}
    graphs, ops, line_of = [], [], []
    outside: list[OpRecord] = []
    lines: dict[str, int] = {}
    known: dict[tuple[int, int], int] = {}  # by graph and operation: executions share theirs
    for op, source in zip(base, problem.sources, strict=True):
        graphs.append(position.get(source.graph, -1))
        joint = captured.graphs[source.graph].joint if source.graph >= 0 else None
        if joint is None:
            ops.append(len(outside))
            outside.append(_outside(op, sum(graph.values[v].bytes for v in op.outputs)))
            line_of.append(-1)
            continue
        ops.append(source.op)
        if (key := (source.graph, source.op)) not in known:
            line = short_line(joint.ops[source.op].line)
            known[key] = -1 if line is None else lines.setdefault(line, len(lines))
        line_of.append(known[key])
    replayed = {int(op.replay): i for i, op in enumerate(base) if op.replay is not None}
    executions = [source.instance for source in problem.sources]
    return StepRecord(
        graphs=graphs,
        ops=ops,
        executions=executions if any(executions) else [],
        outside=outside,
        forward_length=graph.forward_length,
        read_counts=[len(op.inputs) for op in base],
        reads=_numbers(number, base, "inputs"),
        made_counts=[len(op.outputs) for op in base],
        value_bytes=[v.bytes for v in values],
        on_demand=[i for i, v in enumerate(values) if v.on_demand],
        held=[i for i, v in enumerate(values) if v.held_until is not None],
        held_until=[v.held_until for v in values if v.held_until is not None],
        workspace_bytes=[op.workspace_bytes for op in base],
        fixed=[i for i, op in enumerate(base) if op.phase is Phase.FORWARD and not op.recomputable],
        replays=[replayed[graph.base_length + i] for i in range(len(forms))],
        replay_read_counts=[len(op.inputs) for op in forms],
        replay_reads=_numbers(number, forms, "inputs"),
        replay_made_counts=[len(op.outputs) for op in forms],
        replay_makes=_numbers(number, forms, "outputs"),
        replay_workspace_bytes=[op.workspace_bytes for op in forms],
        replay_seconds=_unless_same(forms, [op for op in base if op.replay is not None], graph),
        left_bytes=0 if graph.in_flight is None else graph.in_flight.left_bytes,
        added_up=[] if graph.in_flight is None else list(graph.in_flight.added_up),
        sent=[] if graph.in_flight is None else number[list(graph.in_flight.sent)].tolist(),
        lines=[*map(shortened, lines)],
        line_of=line_of,
    )


def _unless_same(forms: Sequence[Op], first: Sequence[Op], graph: Graph) -> list[float]:
    """The seconds of forms that run again; none where each takes as long as its operation's first run."""
    same = all(op.replay is None or graph.ops[op.replay].seconds == op.seconds for op in first)
    return [] if same else [op.seconds for op in forms]


def _outside(op: Op, made_bytes: int) -> OpRecord:
    phase = "backward" if op.phase is Phase.BACKWARD else "forward"
    return OpRecord(name=op.name, module=op.module, bytes=made_bytes, phase=phase, seconds=op.seconds)


def _numbers(number: Integers, ops: Sequence[Op], field: str) -> list[int]:
    found: list[int] = number[[v for op in ops for v in getattr(op, field)]].tolist() if ops else []
    return found
