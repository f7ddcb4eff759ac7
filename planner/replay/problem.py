"""From a step that is recorded for replay to the problem that solvers see.

Rows are the calls of the forward, then those of the backward in the engine's order. A row before which nodes
ask for saved tensors is an *entry*: calls of the forward can run again there, and only there. All other rows
of the backward are glue, which belongs to no region.

A storage of the forward lives at least until Python frees it, whatever the plan says. If the plan keeps it
for a node, it lives until autograd frees it: the node's last row reads it.

A saved tensor that no node of the step asks for, as of an output that the loss does not use, is dropped if it
can be made of values that live to the end; a backward of another loss makes it on demand.

Each unit of ``fully_shard`` is a region. A call of a unit runs again only where nodes of that unit ask, and
a value that a unit other than the root hands to another is kept. So a re-run reads parameters of the unit
whose nodes run, and of the root: both are gathered then, in whatever order a backward asks.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from planner._torch import operators
from planner.capture.captured_step import CapturedGraph
from planner.costs.devices import Device, round_bytes
from planner.costs.eager_timeline import eager_timeline, real_sizes
from planner.costs.host_time import host_time
from planner.costs.roofline import Costs, roofline
from planner.costs.workspace import NOT_RUN, OpMemory, Workspaces
from planner.graph.replay.rng import generator_state_bytes
from planner.graph.spec import GraphSpec
from planner.heap import made_to_stay
from planner.parallel.units import ROOT
from planner.planfile.replay_record import ReplayRecord
from planner.problem.build import Problem
from planner.problem.rows import Source
from planner.replay.calls import draws
from planner.replay.capture import ReplayedStep
from planner.replay.overwriting import find_overwritten, overwrite, with_outputs_of
from planner.replay.recorder import CallDetails
from planner.replay.repeatable import Repeatable
from planner.training_step.recorder import Event
from solvers.model.arrays import Schedule
from solvers.model.graph import GLUE_REGION, Graph, Op, Phase, Value
from solvers.model.indices import BaseOp, Region, RowId, ValueId, base_op
from solvers.model.schedule import simulate


@dataclass(frozen=True, slots=True)
class ReplayOp:
    """A row as plan files name it, with the fields of a captured graph's operation."""

    index: int
    name: str
    module: str
    backward: bool
    line: str | None


@dataclass
class ReplayGraph:
    """The calls of the module's forward, then the entries of the backward, in the place of a captured graph.

    Attributes:
        ops: Both, in order.
        forward_length: The number of calls of the forward.
        fingerprint: Identifies the operators and their sizes.
        structure: Identifies the operators.
    """

    ops: list[ReplayOp] = field(default_factory=list)
    forward_length: int = 0
    fingerprint: str = ""
    structure: str = ""


@dataclass(frozen=True)
class ReplayProblem(Problem):
    """A problem whose schedules are followed by replaying.

    Attributes:
        replayed: The calls and entries that its rows are.
        wiring: The values that calls read and make, whatever the schedule; numbered as in this problem.
        calls_of: For each row that may run again, the events that this repeats: its own, and those that write
            over its results. Rows are numbered as in the problem without packed masks.
        row_of_event: The row of each event, numbered in the same way.
        number_bytes: By operation, the bytes of Python numbers that PyTorch makes tensors of only under a
            dispatch mode.
        written_over: The rows whose result is written over a value that they read, with the last row at which
            the node would otherwise hold that value, and the value. The result is an output of the next row,
            which does nothing else: so it takes memory only once the operand takes none.
        following_seconds: The host's seconds for a plan that drops something; others run the module as it is.
    """

    replayed: ReplayGraph = field(default_factory=ReplayGraph)
    wiring: ReplayRecord | None = None
    calls_of: Mapping[BaseOp, tuple[int, ...]] = field(default_factory=dict)
    row_of_event: Mapping[int, BaseOp] = field(default_factory=dict)
    number_bytes: Mapping[int, int] = field(default_factory=dict)
    written_over: Mapping[BaseOp, tuple[BaseOp, ValueId]] = field(default_factory=dict)

    def as_it_runs(self, schedule: Schedule, room: int | None = None) -> "ReplayProblem":
        """The problem as a schedule runs. One that drops nothing runs the module as it is, if its peak is
        then at most ``room``: without a dispatch mode, and without results written over others."""
        graph = self.graph
        if len(schedule) > graph.base_length or not (self.number_bytes or self.written_over):
            return self
        numbers = [self.number_bytes.get(s.op, 0) if s.graph >= 0 else 0 for s in self.sources]
        ops = [
            replace(op, workspace_bytes=op.workspace_bytes - n)
            for op, n in zip(graph.ops, numbers, strict=False)
        ]
        for row, (last, value) in self.written_over.items():
            ops[row], ops[row + 1] = with_outputs_of(ops[row], ops[row + 1])
            ops[last] = replace(ops[last], inputs=tuple(sorted({*ops[last].inputs, value})))
        graph = replace(graph, ops=(*ops, *graph.ops[graph.base_length :]))
        peak_bytes = simulate(graph, schedule).peak_bytes
        limit = simulate(self.graph, schedule).peak_bytes if room is None and self.written_over else room
        drops_some = peak_bytes < self.eager.peak_bytes or (limit is not None and limit < peak_bytes)
        return self if drops_some else replace(self, graph=graph)

    def backward_sequences(self, captured: Any, schedule: Any) -> list[list[list[int]]]:
        """The rows of the backward under a schedule: entries, and calls of the forward that run again."""
        rows = [self.sources[int(self.graph.base_of[row])] for row in schedule.tolist()]
        sequence = [source.op for source in rows if source.graph >= 0]
        return [[sequence[self.replayed.forward_length :]]]


@made_to_stay()
def build_replayed(
    captured: ReplayedStep, device: Device, meter: Workspaces | None, costs: Costs | None = None
) -> ReplayProblem:
    """Make the solvers' problem of a recorded step.

    Args:
        captured: The step.
        device: For the rounding of sizes, and for the host's seconds.
        meter: Measures the workspace of every distinct operation by running it; None counts none.
        costs: Seconds of operations; None for the device's roofline.
    """
    costs = costs or roofline(device)
    builder = _Builder(captured, device)
    builder.run()
    python = host_time(device, costs)
    graph = builder.graph(meter, costs, python.again)
    eager = eager_timeline(captured.eager, device, meter, costs)
    saved = captured.saved
    left_bytes = sum(
        graph.values[v].bytes for s, v in builder.value_of.items() if builder.storages[s].died_after is None
    )
    captured.graphs[:] = [CapturedGraph(builder.replayed.structure, 0, 1, GraphSpec(), builder.replayed)]  # type: ignore[arg-type]
    return ReplayProblem(
        graph,
        builder.sources,
        eager,
        left_bytes,
        replayed=builder.replayed,
        wiring=builder.wiring(),
        calls_of=builder.calls_of,
        row_of_event={row.event: base_op(i) for i, row in enumerate(builder.rows) if row.event >= 0},
        number_bytes=builder.number_bytes,
        written_over=builder.held_otherwise,
        following_seconds=saved.forward_events * python.call + len(saved.saves) * python.save,
    )


class _Row(NamedTuple):
    event: int  # -1 for the row after it, whose output is a result that was written over an operand
    op: Op
    values: tuple[ValueId, ...]  # that it makes


class _Builder:
    def __init__(self, captured: ReplayedStep, device: Device) -> None:
        self.captured, self.device = captured, device
        self.recording, self.saved = captured.compiled, captured.saved
        self.events, self.storages = self.recording.events, self.recording.storages
        self.value_of: dict[int, ValueId] = {}
        self.values: list[Value] = []
        self.rows: list[_Row] = []
        self.sources: list[Source] = []
        self.replayed = ReplayGraph()
        self._row_of: list[int] = []  # by event: its row, or the last row before it
        self._states: dict[int, ValueId] = {}  # generator states, by event
        self._repeatable = Repeatable(self.events, self.saved)
        self._ids: dict[int, int] = {}  # by event: the operation of the graph
        self._entry_ids: dict[int, int] = {}  # by row
        self.calls_of: dict[BaseOp, tuple[int, ...]] = {}
        self.number_bytes: dict[int, int] = {}
        self.written_over: dict[BaseOp, int] = {}  # by row, the save that its result is written over
        self.held_otherwise: dict[BaseOp, tuple[BaseOp, ValueId]] = {}  # as of ReplayProblem.written_over

    # ---- rows -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make the rows of the step."""
        saved, events = self.saved, self.events
        repeatable = [self._repeatable.why_not(index) is None for index in range(len(events))]
        remade = {s for index, event in enumerate(events) if repeatable[index] for s in event.allocates}
        self._remade = remade
        self._unasked = self._find_unasked(repeatable)
        entries = self._entries()
        # Only the CPU's kernels are known to allow it.
        over = find_overwritten(self.captured, remade) if self.device.kind == "cpu" else {}
        released: dict[int, set[int]] = {}  # by event: the storages that autograd frees after it
        for save in saved.saves:
            if save.storage in remade and save.unpacked and save.released is not None:
                released.setdefault(save.released, set()).add(save.storage)
        backward = False
        unit_at = {at: saved.saves[number].unit for number, at in saved.unpacked}
        pending: set[int] = set()  # storages that nodes asked for since the last row
        asking = ROOT  # the unit whose nodes asked for them
        for index, (event, call) in enumerate(zip(events, saved.details, strict=True)):
            backward = backward or (event.backward and index >= saved.forward_events)
            if index in entries:
                pending |= entries[index]
                asking = unit_at[index]
            freed = released.get(index, set())
            if not (event.allocates or call.written or freed):  # a node unpacks all that it reads at once
                self._row_of.append(len(self.rows) - 1)
                continue
            unit = asking if pending else call.unit
            self._row(index, event, call, backward, repeatable[index], pending, freed, Region(unit))
            pending = set()
            self._row_of.append(len(self.rows) - 1)
            if index in over:
                self.written_over[base_op(len(self.rows) - 1)] = over[index]
                name = f"result of {self.rows[-1].op.name}"
                result_row = Op((), (), phase=Phase(backward), region=GLUE_REGION, name=name)
                self.rows.append(_Row(-1, result_row, ()))
                self.sources.append(Source())
        self._set_lifetimes()
        forward = [op for op in self.replayed.ops if not op.backward]
        self.replayed.forward_length = len(forward)
        names = "\n".join(f"{op.name} {op.module}" for op in self.replayed.ops)
        sizes = [storage.bytes for storage in self.storages]
        self.replayed.structure = hashlib.sha256(names.encode()).hexdigest()
        self.replayed.fingerprint = hashlib.sha256(f"{names} {sizes}".encode()).hexdigest()

    def _find_unasked(self, repeatable: Sequence[bool]) -> set[int]:
        """The saves that no node asks for, and that a backward of another loss can make on demand: of values
        that live to the end, without generator states, which the problem would have to count."""
        if self.saved.unit_of:  # the parameters that they are made of need not be gathered by then
            return set()
        details, writers = self.saved.details, self._repeatable.writers
        found = {s for s, storage in enumerate(self.storages) if storage.died_after is None}
        for index, event in enumerate(self.events):
            if not repeatable[index]:
                continue
            before = self._repeatable.read_before_writes(index)
            calls = [*before.values(), index, *(w for s in event.allocates for w in writers.get(s, ()))]
            own = {-1, *before, *event.allocates}
            states = self._state_bytes() and any(map(self._draws, calls))
            if not states and all(s in found or s in own for c in calls for s in details[c].operands):
                found.update(event.allocates)
        found &= self._remade
        return {
            number
            for number, save in enumerate(self.saved.saves)
            if save.storage in found
            and self.storages[save.storage].died_after is not None
            and not save.unpacked
            and all(details[w].position < save.begun for w in writers.get(save.storage, ()))
        }

    def _entries(self) -> dict[int, set[int]]:
        """By event, the storages that can be made again and that nodes ask for right before it."""
        found: dict[int, set[int]] = {}
        for number, at in self.saved.unpacked:
            storage = self.saved.saves[number].storage
            if storage in self._remade and at < len(self.events):
                found.setdefault(at, set()).add(storage)
        return found

    def _row(
        self,
        index: int,
        event: Event,
        details: CallDetails,
        backward: bool,
        can_rerun: bool,
        asked: set[int],
        freed: set[int],
        region: Region,
    ) -> None:
        call = event.call
        assert call is not None
        name = str(self.recording.calls[call].func)
        outputs = tuple(self._value(s, name, details.module) for s in event.allocates)
        in_forward = details.position >= 0 and not backward and index < self.saved.forward_events
        reads = {s for s in (*event.reads, *asked, *freed) if s in self.value_of and s not in event.allocates}
        entry = backward and bool(asked)
        source = Source()
        if in_forward or entry:
            number = len(self.replayed.ops)
            source = Source(0, 0, number)
            self._ids[index] = number
            if entry:
                self._entry_ids[len(self.rows)] = number
            self.replayed.ops.append(ReplayOp(number, name, details.module, backward, details.line))
        op = Op(
            tuple(sorted(self.value_of[s] for s in reads)),
            outputs,
            phase=Phase(backward),
            recomputable=can_rerun and in_forward,
            region=region if source.graph >= 0 else GLUE_REGION,
            name=f"{name} #{source.op}" if source.graph >= 0 else name,
            module=details.module,
            blocks=details.blocks,
        )
        writes = tuple(
            self.value_of[s] for s in details.written if s in self.value_of and s not in event.allocates
        )
        op.writes = tuple(dict.fromkeys(writes))
        self.rows.append(_Row(index, op, outputs))
        self.sources.append(source)
        remade = can_rerun or any(storage in self._remade for storage in details.written)
        if in_forward and remade and self._draws(index):
            state = ValueId(len(self.values))
            foreign = operators.is_foreign(self.saved.operators[details.position])
            size = self._state_bytes("cpu+python" if foreign else "cpu")
            self.values.append(Value(size, f"generator state of {name}", on_demand=True))
            self._states[index] = state
            op.outputs = (*outputs, state)

    def _draws(self, index: int) -> bool:
        details = self.saved.details[index]
        return details.position >= 0 and draws(self.saved.operators[details.position])

    def _state_bytes(self, generators: str = "cpu") -> int:
        return generator_state_bytes(generators) if self.device.kind == "cpu" else 0

    def _value(self, storage: int, name: str, module: str) -> ValueId:
        value = ValueId(len(self.values))
        self.values.append(Value(self.storages[storage].bytes, f"{name} @ {module}"))
        self.value_of[storage] = value
        return value

    def _set_lifetimes(self) -> None:
        """Set how long each value is held by Python, by autograd, or to the end of the step."""
        kept: dict[int, list[int | None]] = {}
        for number, save in enumerate(self.saved.saves):
            if save.storage < 0 or number in self._unasked:
                continue
            if save.storage not in self._remade or not save.unpacked:
                kept.setdefault(save.storage, []).append(save.released)
        end = len(self.rows) - 1
        for storage, value in self.value_of.items():
            deaths = [self.storages[storage].died_after, *kept.get(storage, ())]
            until = end if None in deaths else max(self._row_of[d] for d in deaths if d is not None)
            self.values[value] = self.values[value]._replace(held_until=base_op(max(until, 0)))

    # ---- costs -----------------------------------------------------------------------------------------

    def graph(self, meter: Workspaces | None, costs: Costs, again_seconds: float) -> Graph:
        """The solvers' graph with costs; each re-run takes ``again_seconds`` more than the call."""
        calls, outputs, values = self.recording.calls, self.recording.outputs, self.values
        memories = [NOT_RUN] * len(calls) if meter is None else meter.measure(calls)
        seconds = [costs.seconds(c.func, c.args, c.kwargs, o) for c, o in zip(calls, outputs, strict=True)]
        row_of_event = {row.event: base_op(i) for i, row in enumerate(self.rows)}
        known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row in self.rows:
            if row.event < 0:
                continue
            call = self.events[row.event].call
            assert call is not None
            row.op.seconds, row.op.workspace_bytes = seconds[call], memories[call].workspace_bytes
            if self.saved.details[row.event].position >= 0 and (numbers := self._number_bytes(call)):
                row.op.workspace_bytes += numbers
                if row.event in self._ids:
                    self.number_bytes[self._ids[row.event]] = numbers
            key = call, tuple(values[v].bytes for v in row.values)
            if row.values and key not in known:
                grown = any(self.storages[s].grown for s in self.events[row.event].allocates)
                known[key] = real_sizes(calls[call], memories[call], list(key[1]), grown=grown)
            for value, size in zip(row.values, known.get(key, ()), strict=bool(row.values)):
                values[value] = values[value]._replace(bytes=size)
        base = [row.op for row in self.rows]
        ops = list(base)
        for i, row in enumerate(self.rows):
            if row.op.recomputable:
                rerun = self._rerun(row, row_of_event, base, memories, again_seconds)
                if rerun is not None:
                    ops[i] = replace(row.op, replay=RowId(len(ops)))
                    ops.append(rerun)
        saves = {row: self.saved.saves[number] for row, number in self.written_over.items()}
        held = {
            r: (base_op(self._row_of[s.released or 0]), self.value_of[s.storage]) for r, s in saves.items()
        }
        self.held_otherwise = overwrite(ops, len(base), held)
        self.written_over = {row: self.written_over[row] for row in self.held_otherwise}
        rounded = (v._replace(bytes=round_bytes(self.device, v.bytes)) for v in values)
        return Graph(tuple(ops), tuple(rounded), base_length=len(base))

    def _rerun(
        self,
        row: _Row,
        row_of_event: dict[int, BaseOp],
        base: Sequence[Op],
        memories: Sequence[OpMemory],
        more_seconds: float,
    ) -> Op | None:
        """The re-run of a row, with calls that write over its results; None if it is like the first run."""
        own = self.events[row.event].allocates
        writers = sorted({w for s in own for w in self._repeatable.writers.get(s, ())})
        calls = [row.event, *writers]
        self.calls_of[row_of_event[row.event]] = tuple(calls)
        states = [self._states[c] for c in calls if c in self._states]
        before = self._repeatable.read_before_writes(row.event)
        if not (writers or states or more_seconds or before or self._number_bytes(self._call_of(row.event))):
            return None
        makers = sorted(set(before.values()))
        reads = {
            self.value_of[s]
            for c in (*makers, *calls)
            for s in self.saved.details[c].operands
            if s in self.value_of and s not in own and s not in before
        }
        ops = [base[row_of_event[c]] for c in (*makers, *calls)]
        state = self._state_bytes()  # put back after the call
        taken = [memories[self._call_of(c)].workspace_bytes + state * (c in self._states) for c in calls]
        # Bytes for this re-run alone: of the values made right before it, and at most while these are made.
        held, most_before = 0, 0
        for maker in makers:
            makes, workspace = self.events[maker].allocates, memories[self._call_of(maker)].workspace_bytes
            most_before = max(most_before, held + self._bytes_of(makes) + workspace)
            held += self._bytes_of([s for s in makes if s in before])
        return replace(
            row.op,
            inputs=(*sorted(reads), *states),
            outputs=row.values,
            seconds=sum(op.seconds for op in ops) + len(ops) * more_seconds,
            workspace_bytes=max(max(taken) + held, most_before - self._bytes_of(own)),
            replay=None,
            writes=(),
        )

    def _bytes_of(self, storages: Iterable[int]) -> int:
        return sum(round_bytes(self.device, self.values[self.value_of[s]].bytes) for s in storages)

    def _call_of(self, event: int) -> int:
        call = self.events[event].call
        assert call is not None
        return call

    def _number_bytes(self, number: int) -> int:
        """The bytes of the tensors that PyTorch makes of a call's Python numbers under a dispatch mode; the
        operator itself makes its own beside these."""
        if self.device.kind != "cpu":
            return 0
        call = self.recording.calls[number]
        numbers = operators.numbers_for_tensors(call.func, call.args) if call.args else {}
        return sum(operators.number_as_tensor(n).nbytes for n in numbers.values())

    # ---- values that calls read and make ------------------------------------------------------------------

    def wiring(self) -> ReplayRecord:
        """The calls of the module's forward, by position, and the tensors that autograd saves."""
        count = len(self.saved.operators)
        ids = [-1] * count
        operands: list[list[int]] = [[] for _ in range(count)]
        results, written = operands.copy(), operands.copy()
        own_counters = self.saved.own_counters

        def values(storages: Sequence[int]) -> list[int]:
            return [int(self.value_of.get(s, -1)) for s in storages]

        for index, call in enumerate(self.saved.details):
            if call.position >= 0:
                ids[call.position] = self._ids.get(index, -1)
                operands[call.position] = values([-1 if s in own_counters else s for s in call.operands])
                born = set(self.events[index].allocates)
                results[call.position] = values([s if s in born else -1 for s in call.results])
                written[call.position] = values(call.written)
        asked, entries = [], []
        for number, at in self.saved.unpacked:
            if self.saved.saves[number].storage not in self._remade or at >= len(self.events):
                continue
            row = next(
                (r for r in range(max(self._row_of[at], 0), len(self.rows)) if self.rows[r].event >= at), None
            )
            if row is not None and row in self._entry_ids:
                asked.append(number)
                entries.append(self._entry_ids[row])
        dropped = {*asked, *self._unasked}
        saves = [
            int(self.value_of[save.storage]) if number in dropped else -1
            for number, save in enumerate(self.saved.saves)
        ]
        saved_bytes = [  # kernels may make more than their shape functions say
            max(save.bytes, self.values[self.value_of[save.storage]].bytes) if save.bytes else 0
            for save in self.saved.saves
        ]
        return ReplayRecord(
            operators=list(map(str, self.saved.operators)),
            ids=ids,
            operand_counts=list(map(len, operands)),
            operands=list(chain(*operands)),
            result_counts=list(map(len, results)),
            results=list(chain(*results)),
            written_counts=list(map(len, written)),
            written=list(chain(*written)),
            saves=saves,
            begun=[save.begun for save in self.saved.saves],
            saved_bytes=saved_bytes,
            grad_switches=self.saved.grad_switches,
            asked=asked,
            entries=entries,
            written_over=sorted(self.written_over.values()),
        )


def replay_record(problem: ReplayProblem) -> ReplayRecord:
    """The values that the calls of a step read and make, as plan files store them."""
    assert problem.wiring is not None
    # By the order of production, as in the record of the step; the problem numbers bits, too.
    produced = (int(v) for op in problem.graph.ops[: problem.graph.base_length] for v in op.outputs)
    number = {v: i for i, v in enumerate(produced)} | {-1: -1}
    by_value = {name: getattr(problem.wiring, name) for name in ("operands", "results", "written", "saves")}
    return problem.wiring.model_copy(
        update={name: [number[v] for v in values] for name, values in by_value.items()}
    )
