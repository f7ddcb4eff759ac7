"""From a captured step to the problem that solvers see, and back from their schedules.

The rows of the solvers' graph are the operations of every execution of every captured graph, in the
order of the step, with the glue between them. Each storage of each execution is one value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.fx import Node
from torch.fx.node import map_arg

from planner import replay
from planner.capture import CapturedStep, GraphCall
from planner.costs import op_seconds
from planner.devices import Device, round_bytes
from planner.joint import JointGraph, JointOp
from planner.tracking import Event, Recording
from planner.workspace import NOT_RUN, Call, OpMemory, WorkspaceMeter
from solvers.graph import GLUE_REGION, Graph, Op, Phase, Value
from solvers.schedule import Timeline

Measure = Callable[[list[Call]], list[OpMemory]]


@dataclass(frozen=True)
class Source:
    """Where a base row of the problem comes from: operation ``op`` of captured graph ``graph``.

    ``instance`` counts the executions of one graph within the step; ``graph`` is -1 for glue.
    """

    graph: int = -1
    instance: int = 0
    op: int = -1


@dataclass(frozen=True)
class Problem:
    """What is solved.

    Attributes:
        graph: The solvers' graph of the compiled step.
        sources: Where each base row comes from.
        eager: Timeline of the step as it is without a plan.
    """

    graph: Graph
    sources: list[Source]
    eager: Timeline

    def backward_sequences(self, captured: CapturedStep, schedule: np.ndarray) -> list[list[int]]:
        """For every captured graph the operations that its backward runs under a schedule, in order.

        A graph that ran several times in the step runs the same backward each time: it is never
        recomputed (see :func:`build_problem`), so its executions agree.
        """
        steps: list[list[int]] = [[] for _ in captured.graphs]
        for row in schedule.tolist():
            source = self.sources[int(self.graph.base_of[row])]
            if source.graph >= 0 and source.instance == 0:
                steps[source.graph].append(source.op)
        return [
            order[graph.joint.forward_length :] if graph.joint is not None else []
            for graph, order in zip(captured.graphs, steps, strict=True)
        ]


def build_problem(captured: CapturedStep, device: Device, meter: WorkspaceMeter | None) -> Problem:
    """Turn a captured step into the problem that solvers see.

    Args:
        captured: The step.
        device: For seconds and rounding.
        meter: Measures the workspace of every distinct operation by running it; None counts none.
    """
    measure: Measure = meter.measure if meter is not None else lambda calls: [NOT_RUN] * len(calls)
    builder = _Builder(captured, device, measure)
    graph = builder.build()
    return Problem(graph, builder.sources, eager_timeline(captured.eager, device, measure))


def eager_timeline(recording: Recording, device: Device, measure: Measure) -> Timeline:
    """The timeline of a step that was recorded operation by operation."""
    memories = measure(recording.calls)
    seconds = [
        op_seconds(c.func, c.args, c.kwargs, out, device)
        for c, out in zip(recording.calls, recording.outputs, strict=True)
    ]
    length = len(recording.events)
    change = np.zeros(length + 1, dtype=np.int64)
    workspace = np.zeros(length, dtype=np.int64)
    for i, event in enumerate(recording.events):
        assert event.call is not None
        workspace[i] = memories[event.call].workspace_bytes
        sizes = _allocated_bytes(event, recording, memories[event.call], device)
        for storage, size in zip(event.allocates, sizes, strict=True):
            died = recording.storages[storage].died_after
            change[i] += size
            if died is not None:
                change[max(died, i) + 1] -= size
    live = np.cumsum(change[:length])
    total = live + workspace
    peak = int(total.argmax()) if length else 0
    time = float(sum(seconds[e.call] for e in recording.events if e.call is not None))
    final = int(live[-1]) if length else 0
    return Timeline(live, total, int(total.max(initial=0)), peak, final, time)


@dataclass
class _Builder:
    captured: CapturedStep
    device: Device
    measure: Measure
    sources: list[Source] = field(default_factory=list)
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _outputs: list[Any] = field(default_factory=list)
    _bytes: list[int] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _on_demand: set[int] = field(default_factory=set)
    _held_until_event: dict[int, int | None] = field(default_factory=dict)
    _value_of_recorded: dict[int, int] = field(default_factory=dict)
    _maps: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)

    def build(self) -> Graph:
        recording = self.captured.compiled
        executions = [0] * len(self.captured.graphs)
        for event in recording.events:
            if isinstance(event.graph, GraphCall) and not event.graph.backward:
                executions[event.graph.graph] += 1
        released = {
            i: e.graph.released for i, e in enumerate(recording.events) if isinstance(e.graph, GraphCall)
        }
        last_row: list[int] = []
        replays: list[tuple[int, dict[str, Any]]] = []
        backward = False
        for index, event in enumerate(recording.events):
            backward = backward or event.backward
            if isinstance(event.graph, GraphCall):
                once = executions[event.graph.graph] == 1
                self._graph_event(event, event.graph, backward, once, replays)
            else:
                self._glue_event(event, backward)
            for storage in event.allocates:
                value = self._value_of_recorded.get(storage)
                if value is not None:
                    died = recording.storages[storage].died_after
                    # Freed inside a captured graph: held by others only up to the event before.
                    died = died - 1 if died is not None and storage in released.get(died, ()) else died
                    self._hold(value, died, index)
            last_row.append(len(self._rows) - 1)
        return self._assemble(last_row, replays)

    # ---- rows ----------------------------------------------------------------------------------------

    def _value(self, size: int, name: str) -> int:
        self._bytes.append(size)
        self._names.append(name)
        return len(self._bytes) - 1

    def _hold(self, value: int, died_after: int | None, born: int) -> None:
        known = self._held_until_event.get(value, born)
        self._held_until_event[value] = (
            None if died_after is None or known is None else max(died_after, known)
        )

    def _glue_event(self, event: Event, backward: bool) -> None:
        recording = self.captured.compiled
        assert event.call is not None
        call, out = recording.calls[event.call], recording.outputs[event.call]
        if not event.allocates and str(call.func) == "aten.detach.default":
            return
        values = [self._value(recording.storages[s].bytes, str(call.func)) for s in event.allocates]
        self._value_of_recorded.update(zip(event.allocates, values, strict=True))
        reads = [
            self._value_of_recorded[s] for s in dict.fromkeys(event.reads) if s in self._value_of_recorded
        ]
        self._row(
            Source(), call, out, [r for r in reads if r not in values], values, backward, name=str(call.func)
        )

    def _row(
        self, source: Source, call: Call, out: Any, reads: Sequence[int], values: Sequence[int], backward: bool,
        *, name: str, module: str = "", region: int = GLUE_REGION, recomputable: bool = False,
    ) -> None:  # fmt: skip
        self._rows.append(
            {
                "inputs": tuple(reads), "outputs": tuple(values), "recomputable": recomputable,
                "phase": Phase.BACKWARD if backward else Phase.FORWARD, "region": region,
                "name": name, "module": module, "new": tuple(values),
            }
        )  # fmt: skip
        self._calls.append(call)
        self._outputs.append(out)
        self.sources.append(source)

    def _graph_event(
        self,
        event: Event,
        call: GraphCall,
        backward: bool,
        once: bool,
        replays: list[tuple[int, dict[str, Any]]],
    ) -> None:
        joint = self.captured.graphs[call.graph].joint
        if joint is None:
            # Nothing to differentiate: outputs appear as if one operation made them.
            recording = self.captured.compiled
            values = [self._value(recording.storages[s].bytes, "graph output") for s in event.allocates]
            self._value_of_recorded.update(zip(event.allocates, values, strict=True))
            self._row(Source(), Call(None, ()), None, (), values, backward, name=f"graph {call.graph}")  # type: ignore[arg-type]
            return
        storages = self._maps.setdefault((call.graph, call.instance), {})
        placeholders = joint.tangents if call.backward else joint.primals
        for placeholder, recorded in zip(placeholders, call.arguments, strict=True):
            if placeholder in joint.storage_of and recorded in self._value_of_recorded:
                storages[joint.storage_of[placeholder]] = self._value_of_recorded[recorded]
        ops = joint.ops[joint.forward_length :] if call.backward else joint.ops[: joint.forward_length]
        region = list(self._maps).index((call.graph, call.instance))
        for op in ops:
            self._joint_row(joint, op, call, storages, backward, region, once, replays)
        for output, recorded in zip(joint.outputs[call.backward], call.outputs, strict=True):
            if recorded < 0 or recorded in self._value_of_recorded or not isinstance(output, Node):
                continue
            value = storages.get(joint.storage_of.get(output, -1))
            if value is not None:
                self._value_of_recorded[recorded] = value

    def _joint_row(
        self, joint: JointGraph, op: JointOp, call: GraphCall, storages: dict[int, int], backward: bool, region: int,
        once: bool, replays: list[tuple[int, dict[str, Any]]],
    ) -> None:  # fmt: skip
        label = f"{op.name} #{op.index}"
        reads = [storages[s] for s in op.reads if s in storages]
        for storage in op.allocates:
            storages[storage] = self._value(joint.storage_bytes[storage], f"{op.node.name} @ {op.module}")
        values = [storages[s] for s in op.allocates]
        recomputable = op.recomputable and once and not backward
        self._row(
            Source(call.graph, call.instance, op.index), _call_of(op.node), op.node.meta.get("val"), reads, values,
            backward, name=label, module=op.module, region=region, recomputable=recomputable,
        )  # fmt: skip
        if not recomputable:
            return
        row = len(self._rows) - 1
        if op.random:
            state_bytes = replay.generator_state_bytes(replay.generator_device(op.node)[0])
            state = self._value(state_bytes, f"{op.node.name} generator state")
            self._on_demand.add(state)
            self._rows[row]["outputs"] = (*values, state)
            again = {"inputs": (*reads, state), "outputs": tuple(values), "extra": state_bytes, "call": None}
            replays.append((row, again))
        elif op.batch_norm:
            target, arguments = replay.batch_norm_again(op.node.args)
            inputs = [
                storages[s]
                for n in op.node.args[:3]
                if isinstance(n, Node)
                for s in joint._storages_of(n)
                if s in storages
            ]
            again = {
                "inputs": tuple(dict.fromkeys(inputs)), "outputs": tuple(storages[s] for s in op.allocates_again), "extra": 0,
                "call": Call(target, map_arg(arguments, _value_of), {}),
            }  # fmt: skip
            replays.append((row, again))

    # ---- costs -----------------------------------------------------------------------------------------

    def _assemble(self, last_row: list[int], replays: list[tuple[int, dict[str, Any]]]) -> Graph:
        again_calls = [a["call"] for _, a in replays if a["call"] is not None]
        runnable = [c if c.func is not None else None for c in self._calls]
        memories_run = iter(self.measure([c for c in runnable if c is not None] + again_calls))
        memories = [next(memories_run) if c is not None else NOT_RUN for c in runnable]
        again_memories = [next(memories_run) if a["call"] is not None else NOT_RUN for _, a in replays]
        sizes = list(self._bytes)
        ops: list[Op] = []
        for row, call, out, memory in zip(self._rows, self._calls, self._outputs, memories, strict=True):
            seconds = (
                op_seconds(call.func, call.args, call.kwargs, out, self.device)
                if call.func is not None
                else 0.0
            )
            real = [b for b in memory.output_bytes if b]
            if len(real) == len(row["new"]):
                for value, size in zip(row["new"], real, strict=True):
                    sizes[value] = size
            ops.append(_op(row, seconds, memory.workspace_bytes))
        for (base, again), memory in zip(replays, again_memories, strict=True):
            first = ops[base]
            workspace = (memory if again["call"] is not None else memories[base]).workspace_bytes + again[
                "extra"
            ]
            ops[base] = _with_replay(first, len(ops))
            ops.append(
                Op(again["inputs"], again["outputs"], first.seconds, workspace, first.phase, True, first.region, None,
                   first.name, first.module)
            )  # fmt: skip
        end = len(self._rows) - 1
        values = []
        for i, size in enumerate(sizes):
            held: int | None = None
            if i in self._held_until_event:
                event = self._held_until_event[i]
                held = end if event is None else max(last_row[event], 0)
            values.append(Value(round_bytes(self.device, size), self._names[i], held, i in self._on_demand))
        return Graph(tuple(ops), tuple(values), base_length=len(self._rows))


def _op(row: dict[str, Any], seconds: float, workspace: int) -> Op:
    return Op(
        row["inputs"], row["outputs"], seconds, workspace, row["phase"], row["recomputable"], row["region"], None,
        row["name"], row["module"],
    )  # fmt: skip


def _with_replay(op: Op, replay_row: int) -> Op:
    return Op(
        op.inputs, op.outputs, op.seconds, op.workspace_bytes, op.phase, op.recomputable, op.region, replay_row,
        op.name, op.module,
    )  # fmt: skip


def _value_of(node: Node) -> Any:
    return node.meta.get("val")


def _call_of(node: Node) -> Call:
    args, kwargs = map_arg((node.args, node.kwargs), _value_of)
    return Call(node.target, args, kwargs)  # type: ignore[arg-type]


def _allocated_bytes(event: Event, recording: Recording, memory: OpMemory, device: Device) -> list[int]:
    sizes = [recording.storages[s].bytes for s in event.allocates]
    real = [b for b in memory.output_bytes if b]
    if len(real) == len(sizes):
        sizes = real
    return [round_bytes(device, s) for s in sizes]
