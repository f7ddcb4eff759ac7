"""From a captured step to the problem that solvers see, and back from their schedules.

The rows of the solvers' graph are the operations of every execution of every captured graph, in the order of
the step, and between them those of the glue (operations that no graph holds). Each storage of each execution
is one value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.fx import Node
from torch.fx.node import map_arg

from planner._torch.operators import waits_for_data
from planner.addresses import addresses
from planner.capture.captured_step import CapturedStep
from planner.capture.graphs.graph_call import GraphCall
from planner.costs.devices import Device, round_bytes
from planner.costs.eager_timeline import EagerTimeline, eager_timeline, real_sizes
from planner.costs.host_time import entering_seconds, host_time
from planner.costs.roofline import Costs, roofline
from planner.costs.workspace import NOT_RUN, OpMemory, Workspaces
from planner.graph.dying_operands import writing
from planner.graph.in_place import operator_in_place
from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.overwritten import copy_bytes
from planner.graph.replay.rng import RandomNumbers
from planner.heap import made_to_stay
from planner.lowering.partition import no_recomputation
from planner.problem.in_flight import unplanned_with_others, with_others
from planner.problem.input_copies import InputCopies
from planner.problem.rows import Again, Facts, Row, Source, example, of_size, set_costs
from planner.training_step.call import Call
from planner.training_step.recorder import Event
from solvers.model.arrays import Schedule
from solvers.model.graph import GLUE_REGION, Graph, Op, Phase, Value
from solvers.model.indices import BaseOp, Region, RowId, ValueId, base_op, numbered
from solvers.model.schedule import lifetimes


@dataclass(frozen=True)
class Problem:
    """The problem that solvers solve.

    Attributes:
        graph: The solvers' graph of the compiled step.
        sources: Where each base row comes from.
        eager: Timeline of the step without a plan.
        final_bytes: Bytes that a step leaves, whatever its schedule: gradients and outputs.
        packed: The operations whose masks the forward packs, see :mod:`planner.problem.encodings`.
        host_bytes: Bytes of all results that it keeps on the host, which are there when the backward begins.
        completed: For each operation whose result is sent, the later one after which it has arrived.
        following_seconds: Seconds in which Python enters its graphs, even if nothing is recomputed.
    """

    graph: Graph
    sources: list[Source]
    eager: EagerTimeline
    final_bytes: int
    packed: frozenset[Source] = frozenset()
    host_bytes: int = 0
    completed: Mapping[Source, Source] = field(default_factory=dict)
    following_seconds: float = 0.0

    def backward_sequences(self, captured: CapturedStep, schedule: Schedule) -> list[list[list[int]]]:
        """The backward of every captured graph under a schedule: for each execution its operations, in order.

        The step may not run the backward of an execution; if it runs later after all, it re-runs nothing.
        """
        steps: list[dict[int, list[int]]] = [{} for _ in captured.graphs]
        for row in schedule.tolist():
            source = self.sources[int(self.graph.base_of[row])]
            if source.graph >= 0:
                steps[source.graph].setdefault(source.instance, []).append(source.op)
        sequences: list[list[list[int]]] = []
        for graph, executions in zip(captured.graphs, steps, strict=True):
            joint = graph.joint
            sequences.append([])
            if joint is None:
                continue
            for instance in range(max(executions, default=-1) + 1):
                again = executions.get(instance, [])[joint.forward_length :]
                sequences[-1].append(again or no_recomputation(joint))
        return sequences

    def peaks_by_graph(self) -> dict[int, int]:
        """The most bytes of each captured graph's own values that live at once, if nothing is recomputed."""
        graph, lives = self.graph, lifetimes(self.graph, self.graph.base_schedule)
        sizes = np.array([value.bytes for value in graph.values], dtype=np.int64)[lives.value]
        of = np.array([source.graph for source in self.sources])[graph.producer[lives.value]]
        peaks = {}
        for number in sorted({*of.tolist()} - {-1}):
            own = of == number
            change = np.zeros(graph.base_length + 1, dtype=np.int64)
            np.add.at(change, lives.start[own], sizes[own])
            np.subtract.at(change, lives.end[own] + 1, sizes[own])
            peaks[number] = int(np.cumsum(change).max())
        return peaks

    def drawn(self, captured: CapturedStep) -> list[ValueId]:
        """The values that operations of the forward's graphs draw, or may."""
        joints = [graph.joint for graph in captured.graphs]
        return [
            value
            for row, source in numbered(BaseOp, self.sources)
            if source.graph >= 0 and (joint := joints[source.graph]) is not None
            if isinstance(joint.ops[source.op].rule, RandomNumbers)
            for value in self.graph.ops[row].outputs
        ]


@made_to_stay()
def build_problem(
    captured: CapturedStep,
    device: Device,
    meter: Workspaces | None,
    costs: Costs | None = None,
    *,
    copying: bool = False,
    in_flight: int | None = None,
) -> Problem:
    """Build the problem that solvers see from a captured step.

    Args:
        captured: The step.
        device: For seconds and rounding.
        meter: Measures the workspace of every distinct operation by running it; None counts none.
        costs: Seconds of operations; None for the device's roofline.
        copying: Whether re-runs read copies of inputs, see :mod:`planner.graph.overwritten`. The copies count
            no time.
        in_flight: Micro-batches in flight, the step's own included; None for a step by itself.
    """
    costs = costs or roofline(device)
    builder = _Builder(captured, device, copying)
    builder.run()
    graph = builder.graph(meter, costs)
    sources = [row.source for row in builder.rows]
    eager, left = eager_timeline(captured.eager, device, meter, costs), builder.final_bytes(graph)
    if in_flight is not None:
        graph, left = with_others(graph, captured, builder.value_of, in_flight)
        eager = unplanned_with_others(captured, eager, in_flight)
    entered = sum(e.graph is not None and not e.graph.backward for e in captured.compiled.events)
    following = entered * host_time(device, costs).graph
    return Problem(graph, sources, eager, left, following_seconds=following)


@dataclass
class _Builder:
    captured: CapturedStep
    device: Device
    copying: bool = False
    rows: list[Row] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    value_of: dict[int, ValueId] = field(default_factory=dict)  # by recorded storage
    _storages: dict[tuple[int, int], dict[int, ValueId]] = field(default_factory=dict)  # by graph, instance
    _region_of: dict[tuple[int, int], int] = field(default_factory=dict)
    _calls: dict[Node, Call | None] = field(default_factory=dict)
    _facts: dict[JointOp, Facts] = field(default_factory=dict)
    _row_of: dict[JointOp, BaseOp] = field(default_factory=dict)
    _last_row: list[int] = field(default_factory=list)  # by event; -1 before the first row
    _held: dict[ValueId, int | None] = field(default_factory=dict)  # by value: event after which it is freed
    _waiting: int | None = None  # the last row that waited for data, until a graph is entered
    _entered: dict[int, int] = field(default_factory=dict)  # by such a row: tensors of the graph entered then

    def run(self) -> None:
        """Make a row of everything that happened in the step."""
        backward = False
        for index, event in enumerate(self.captured.compiled.events):
            backward = backward or event.backward
            if isinstance(event.graph, GraphCall):
                self._graph_event(event, event.graph, backward)
            else:
                self._glue_event(event, backward)
            self._last_row.append(len(self.rows) - 1)
            for storage in event.allocates:
                if storage in self.value_of:
                    self._hold(self.value_of[storage], self._held_until(storage), index)
        self._hold_what_is_saved()

    def graph(self, meter: Workspaces | None, costs: Costs) -> Graph:
        """The solvers' graph, with seconds and bytes for the device."""
        memories, replayed = self._measure(meter)
        values, ops = list(self.values), list[Op]()
        # Both by call, which all executions of a graph share.
        taken: dict[int, float] = {}
        made: dict[tuple[int, ...], list[int]] = {}
        for index, (row, memory, number) in enumerate(zip(self.rows, memories, self._numbers(), strict=True)):
            seconds, call = 0.0, row.call
            if row.allocates:
                known = [values[v].bytes for v in row.allocates]
                key = number, *known
                if call is None or key not in made:
                    made[key] = real_sizes(call, memory, known)
                for value, size in zip(row.allocates, made[key], strict=True):
                    values[value] = of_size(values[value], size)
            if call is not None:
                if number not in taken:
                    taken[number] = costs.seconds(call.func, call.args, call.kwargs, row.output)
                seconds = taken[number]
            seconds += entering_seconds(self.device, self._entered.get(index, 0))
            set_costs(row.op, seconds, memory.workspace_bytes)
            ops.append(row.op)
        for base, row in numbered(BaseOp, self.rows):
            if row.again is None:
                continue
            first, again = ops[base], row.again
            memory, writers = replayed.get(base, memories[base]), [ops[w] for w in again.writers]
            held = [memory.workspace_bytes + again.extra_bytes, *(w.workspace_bytes for w in writers)]
            ops[base] = replace(first, replay=RowId(len(ops)))
            ops.append(
                replace(
                    first,
                    inputs=again.inputs,
                    outputs=again.outputs,
                    seconds=first.seconds + sum(w.seconds for w in writers),
                    workspace_bytes=max(held),
                )
            )
        end = len(self.rows) - 1
        for value, event in self._held.items():
            until = end if event is None else max(self._last_row[event], 0)
            values[value] = values[value]._replace(held_until=base_op(until))
        rounded = (of_size(v, round_bytes(self.device, v.bytes)) for v in values)
        return Graph(tuple(ops), tuple(rounded), base_length=len(self.rows))

    def final_bytes(self, graph: Graph) -> int:
        """Bytes of the values that the step does not free."""
        return sum(graph.values[value].bytes for value, event in self._held.items() if event is None)

    def _measure(self, meter: Workspaces | None) -> tuple[list[OpMemory], dict[int, OpMemory]]:
        if meter is None:
            return [NOT_RUN] * len(self.rows), {}
        again = {i: r.again.call for i, r in enumerate(self.rows) if r.again is not None and r.again.call}
        numbers = self._numbers()
        calls = {n: row.call for n, row in zip(numbers, self.rows, strict=True)}
        calls |= {id(call): call for call in again.values()}
        distinct = {n: call for n, call in calls.items() if call is not None}
        of_call = dict(zip(distinct, meter.measure(list(distinct.values())), strict=True))
        return [of_call.get(n, NOT_RUN) for n in numbers], {i: of_call[id(call)] for i, call in again.items()}

    def _numbers(self) -> list[int]:
        """The identity of the call of each row, which executions of a graph share."""
        numbers: list[int] = addresses([row.call for row in self.rows]).tolist()
        return numbers

    # ---- rows ------------------------------------------------------------------------------------

    def _glue_event(self, event: Event, backward: bool) -> None:
        recording = self.captured.compiled
        assert event.call is not None
        call = recording.calls[event.call]
        name = str(call.func)
        if not event.allocates and name == "aten.detach.default":
            return
        made = self._values_of(event, name)
        reads = [self.value_of[s] for s in dict.fromkeys(event.reads) if s in self.value_of]
        op = Op(
            tuple(r for r in reads if r not in made),
            made,
            phase=Phase(backward),
            recomputable=False,
            region=GLUE_REGION,
            name=name,
        )
        if not backward and waits_for_data(call.func):
            self._waiting = len(self.rows)
        self.rows.append(Row(Source(), op, call, recording.outputs[event.call], made))

    def _graph_event(self, event: Event, call: GraphCall, backward: bool) -> None:
        joint = self.captured.graphs[call.graph].joint
        if joint is None:
            # Nothing is differentiated: one operation stands for the graph, and makes its new storages.
            name = f"graph {call.graph}"
            made = self._values_of(event, name)
            op = Op((), made, phase=Phase(backward), recomputable=False, region=GLUE_REGION, name=name)
            self.rows.append(Row(Source(), op, None, None, made))
            return
        if self._waiting is not None and not call.backward:
            self._entered[self._waiting] = len(joint.primals)
            self._waiting = None
        execution = (call.graph, call.instance)
        storages = self._storages.setdefault(execution, {})
        region = Region(self._region_of.setdefault(execution, len(self._region_of)))
        placeholders = joint.tangents if call.backward else joint.primals
        for placeholder, recorded in zip(placeholders, call.arguments, strict=True):
            if placeholder in joint.storage_of and recorded in self.value_of:
                storages[joint.storage_of[placeholder]] = self.value_of[recorded]
        split = joint.forward_length
        copies, first = InputCopies(joint, self.copying), len(self.rows)
        handed = frozenset(s for op in joint.ops if op.is_input for s in op.reads)
        for joint_op in joint.ops[split:] if call.backward else joint.ops[:split]:
            for primal in copies.before(joint_op):
                self.rows.append(self._copy_row(joint, primal, storages, region, joint_op.module))
                copies.values[primal] = self.rows[-1].op.outputs[0]
            source = Source(call.graph, call.instance, joint_op.index)
            self._row_of[joint_op] = base_op(len(self.rows))
            self.rows.append(self._joint_row(joint, joint_op, source, storages, region, backward))
        for row in self.rows[first:]:
            if row.op.recomputable:
                self._replay(row, joint.ops[row.source.op], handed, storages, copies)
        outputs = joint.outputs[call.backward]
        if not call.backward:
            overwritten = self.captured.graphs[call.graph].overwritten
            self._mark_overwritten(joint, [outputs[i] for i in overwritten], storages)
        for output, recorded in zip(outputs, call.outputs, strict=True):
            if recorded >= 0 and recorded not in self.value_of and isinstance(output, Node):
                value = storages.get(joint.storage_of.get(output, -1))
                if value is not None:
                    self.value_of[recorded] = value

    def _joint_row(
        self,
        joint: JointGraph,
        op: JointOp,
        source: Source,
        storages: dict[int, ValueId],
        region: Region,
        backward: bool,
    ) -> Row:
        facts = self._facts.get(op) or self._facts.setdefault(op, Facts.of(op))
        reads = tuple([storages[s] for s in op.reads if s in storages])
        made: tuple[ValueId, ...] = ()
        for storage in op.allocates:
            storages[storage] = value = self._value(Value(joint.storage_bytes[storage], facts.value_name))
            made = *made, value
        return Row(
            source,
            Op(
                reads,
                made,
                phase=Phase.BACKWARD if backward else Phase.FORWARD,
                recomputable=facts.recomputable and not backward,
                region=region,
                name=facts.name,
                module=op.module,
                writes=() if op.written not in storages else (storages[op.written],),
                blocks=op.blocks,
            ),
            self._call_of(op.node),
            op.node.meta.get("val"),
            made,
        )

    def _call_of(self, node: Node) -> Call | None:
        """The call of a node, the same one in all executions of its graph; an input has none."""
        if node not in self._calls:
            self._calls[node] = _call_of(node)
        return self._calls[node]

    def _replay(
        self,
        row: Row,
        op: JointOp,
        handed: frozenset[int],
        storages: dict[int, ValueId],
        copies: InputCopies,
    ) -> None:
        """Give a row its replay form, where a second run differs from the first, or may read an input that is
        fetched."""
        facts = self._facts[op]
        as_before = facts.is_run_as_before and handed.isdisjoint(op.reads)
        if as_before and not op.writers and not copies.are_read(facts.read_again):
            return
        row.again = again = Again(
            tuple(v for v in copies.read(facts.read_again, storages) if v not in row.allocates),
            tuple(storages[s] for s in op.allocates_again),
            call=facts.call_again,
            writers=tuple(self._row_of[w] for w in op.writers),
        )
        if (state := facts.state) is not None:
            if state.on_host and self.device.kind != "cpu":
                state = replace(state, bytes=0, held_bytes=0)
            kept = self._value(Value(state.bytes, f"{state.name} state of {op.node.name}", on_demand=True))
            row.op = replace(row.op, outputs=(*row.op.outputs, kept))
            again.inputs, again.extra_bytes = (*again.inputs, kept), state.held_bytes

    def _copy_row(
        self, joint: JointGraph, primal: Node, storages: dict[int, ValueId], region: Region, module: str
    ) -> Row:
        """A row that copies an input; the copy exists only in schedules that read it."""
        name = f"copy of {primal.name}"
        reads = tuple(storages[s] for s in joint.storages_of(primal) if s in storages)
        made = (self._value(Value(copy_bytes(primal), name, on_demand=True)),)
        op = Op(reads, made, recomputable=False, region=region, name=name, module=module)
        return Row(Source(), op, None, None, made)

    def _hold_what_is_saved(self) -> None:
        """Hold the values that are saved for a backward that the step does not run: it re-runs nothing."""
        events = self.captured.compiled.events
        calls = [(index, event.graph) for index, event in enumerate(events) if event.graph is not None]
        differentiated = {(call.graph, call.instance) for _, call in calls if call.backward}
        for index, call in calls:
            joint = self.captured.graphs[call.graph].joint
            if joint is None or call.token < 0 or (call.graph, call.instance) in differentiated:
                continue
            storages, until = self._storages[call.graph, call.instance], self._held_until(call.token)
            for storage in {s for op in joint.ops[joint.forward_length :] for s in op.reads}:
                if storage in storages:
                    self._hold(storages[storage], until, index)

    # ---- values ------------------------------------------------------------------------------------

    def _value(self, value: Value) -> ValueId:
        self.values.append(value)
        return ValueId(len(self.values) - 1)

    def _mark_overwritten(
        self, joint: JointGraph, outputs: Iterable[Any], storages: dict[int, ValueId]
    ) -> None:
        """Note which values hold results that the step changes in place before their backward."""
        for output in outputs:
            value = storages.get(joint.storage_of.get(output, -1))
            if value is not None:
                self.values[value] = self.values[value]._replace(overwritten=True)

    def _values_of(self, event: Event, name: str) -> tuple[ValueId, ...]:
        sizes = [self.captured.compiled.storages[s].bytes for s in event.allocates]
        made = tuple(self._value(Value(size, name)) for size in sizes)
        self.value_of.update(zip(event.allocates, made, strict=True))
        return made

    def _held_until(self, storage: int) -> int | None:
        """The last event at which others than the graphs hold a storage; None if they hold it to the end."""
        died = self.captured.compiled.storages[storage].died_after
        if died is None:
            return None
        call = self.captured.compiled.events[died].graph
        # A captured graph freed it: others held it only up to the event before.
        return died - 1 if isinstance(call, GraphCall) and storage in call.released else died

    def _hold(self, value: ValueId, until: int | None, born: int) -> None:
        known = self._held.get(value, born)
        self._held[value] = None if until is None or known is None else max(until, known)


def _call_of(node: Node) -> Call | None:
    if node.op == "placeholder":
        return None
    into = writing(node)
    args: Sequence[Any]
    args, kwargs = map_arg((node.args, node.kwargs if into is None else into.kwargs(node)), example)
    func: Any = operator_in_place(node) or (node.target if into is None else into.operator)
    return Call(func, args, kwargs)
