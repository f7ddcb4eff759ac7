"""From a step that is followed by replaying to the problem that solvers see.

Rows are the calls of the forward, then those of the backward in the engine's order. A row before which nodes
ask for saved tensors is an *entry*: there, and only there, calls of the forward can run again. All other rows
of the backward are outside of any region, as code between graphs is.

A storage of the forward lives until Python lets go of it, whatever the plan says. Where the plan keeps it for
a node it lives until autograd lets go of it, which is modelled as a read by the last row of that node.

A tensor that autograd saves and no node of the step asks for, as of an output that the loss does not use, is
dropped where it can be made of what is there to the end: a backward of another loss makes it on demand.

Where ``fully_shard`` shards parts of the module, each of its units is a region: a call of a unit runs again
only where nodes of that unit ask, and what units other than the root hand to others is kept. So whatever is
made again, in whatever order a backward asks for it, reads parameters of the unit whose nodes run, and of the
root, which are gathered then.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from planner._torch import operators
from planner._torch.execution.written_over import can_write_over
from planner.capture.captured_step import CapturedGraph
from planner.costs.devices import Device, round_bytes
from planner.costs.eager_timeline import eager_timeline, real_sizes
from planner.costs.host_time import host_time
from planner.costs.roofline import Costs, roofline
from planner.costs.workspace import NOT_RUN, OpMemory, Workspaces
from planner.graph.replay.packed import LEAST_ELEMENTS
from planner.graph.replay.rng import generator_state_bytes
from planner.graph.spec import GraphSpec
from planner.heap import made_to_stay
from planner.planfile.replay_record import ReplayRecord
from planner.problem.build import Problem
from planner.problem.rows import Source
from planner.replay.calls import DETACH, draws
from planner.replay.capture import ReplayedStep
from planner.replay.recorder import Made
from planner.replay.repeatable import Repeatable
from planner.replay.units import ROOT
from planner.training_step.recorder import Event
from solvers.model.arrays import Schedule
from solvers.model.graph import GLUE_REGION, Graph, Op, Phase, Value
from solvers.model.indices import BaseOp, Region, RowId, ValueId, base_op
from solvers.model.schedule import simulate


@dataclass(frozen=True, slots=True)
class ReplayOp:
    """A row as plan files name it, with the fields that an operation of a captured graph has."""

    index: int
    name: str
    module: str
    backward: bool
    line: str | None


@dataclass
class ReplayGraph:
    """What stands in the place of a captured graph: the calls of the module's forward, then the entries of
    the backward.

    Attributes:
        ops: Both, in order.
        forward_length: How many are calls of the forward.
        fingerprint: Identifies them together with their sizes.
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
        replayed: What its rows are.
        wiring: How they are put together, whatever the schedule; values are those of the problem.
        calls_of: For rows that may run again the events that then happen: its own, and those that write over
            its results. Of the problem in which nothing is packed.
        row_of_event: The row of each event. Of the same problem.
        number_bytes: By operation, what Python numbers take that only a dispatch mode makes tensors of.
        written_over: The rows whose result is written over what they read. It is an output of the next row,
            which does nothing else, so that it takes memory only where the operand no longer does. With the
            value that they read, and the row up to which a node holds that otherwise.
        following_seconds: Of a plan that drops something; others run the module as it is.
    """

    replayed: ReplayGraph = field(default_factory=ReplayGraph)
    wiring: ReplayRecord | None = None
    calls_of: Mapping[BaseOp, tuple[int, ...]] = field(default_factory=dict)
    row_of_event: Mapping[int, BaseOp] = field(default_factory=dict)
    number_bytes: Mapping[int, int] = field(default_factory=dict)
    written_over: Mapping[BaseOp, tuple[BaseOp, ValueId]] = field(default_factory=dict)

    def as_it_runs(self, schedule: Schedule, room: int | None = None) -> "ReplayProblem":
        """The problem of a plan for a dynamic peak. One that drops nothing, and fits all the same, runs as it
        is, without a dispatch mode."""
        graph = self.graph
        if len(schedule) > graph.base_length or not (self.number_bytes or self.written_over):
            return self
        less = [self.number_bytes.get(s.op, 0) if s.graph >= 0 else 0 for s in self.sources]
        ops = [
            replace(op, workspace_bytes=op.workspace_bytes - n)
            for op, n in zip(graph.ops, less, strict=False)
        ]
        for row, (last, value) in self.written_over.items():
            ops[row], ops[row + 1] = with_outputs_of(ops[row], ops[row + 1])
            ops[last] = replace(ops[last], inputs=tuple(sorted({*ops[last].inputs, value})))
        graph = replace(graph, ops=(*ops, *graph.ops[graph.base_length :]))
        peak_bytes = simulate(graph, schedule).peak_bytes
        most = simulate(self.graph, schedule).peak_bytes if room is None and self.written_over else room
        dropped = peak_bytes < self.eager.peak_bytes or (most is not None and most < peak_bytes)
        return self if dropped else replace(self, graph=graph)

    def backward_sequences(self, captured: Any, schedule: Any) -> list[list[list[int]]]:
        """What the backward runs under a schedule: entries, and calls of the forward that run again."""
        rows = [self.sources[int(self.graph.base_of[row])] for row in schedule.tolist()]
        sequence = [source.op for source in rows if source.graph >= 0]
        return [[sequence[self.replayed.forward_length :]]]


@made_to_stay()
def build_replayed(
    captured: ReplayedStep, device: Device, meter: Workspaces | None, costs: Costs | None = None
) -> ReplayProblem:
    """Make of a recorded step the problem that solvers see.

    Args:
        captured: The step.
        device: For seconds and rounding.
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
    left = sum(
        graph.values[v].bytes for s, v in builder.value_of.items() if builder.storages[s].died_after is None
    )
    captured.graphs[:] = [CapturedGraph(builder.replayed.structure, 0, 1, GraphSpec(), builder.replayed)]  # type: ignore[arg-type]
    return ReplayProblem(
        graph,
        builder.sources,
        eager,
        left,
        replayed=builder.replayed,
        wiring=builder.wiring(),
        calls_of=builder.calls_of,
        row_of_event={row.event: base_op(i) for i, row in enumerate(builder.rows) if row.event >= 0},
        number_bytes=builder.number_bytes,
        written_over=builder.until,
        following_seconds=saved.forward_events * python.call + len(saved.saves) * python.save,
    )


def with_outputs_of(op: Op, other: Op) -> tuple[Op, Op]:
    """Two operations, each with the outputs of the other."""
    return replace(op, outputs=other.outputs), replace(other, outputs=op.outputs)


class _Row(NamedTuple):
    event: int  # -1: where a result is there that was written over an operand
    op: Op
    made: tuple[ValueId, ...]


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
        self._row_of: list[int] = []  # by event: the row that it is, or the last one before it
        self._states: dict[int, ValueId] = {}  # by event
        self._repeatable = Repeatable(self.events, self.saved)
        self._ids: dict[int, int] = {}  # by event: the operation of the graph
        self._entry_ids: dict[int, int] = {}  # by row
        self.calls_of: dict[BaseOp, tuple[int, ...]] = {}
        self.number_bytes: dict[int, int] = {}
        self.written_over: dict[BaseOp, int] = {}  # by row: the save
        self.until: dict[BaseOp, tuple[BaseOp, ValueId]] = {}

    # ---- rows -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make a row of everything that happened in the step."""
        saved, events = self.saved, self.events
        again = [self._repeatable.may_run_again(index) for index in range(len(events))]
        remade = {s for index, event in enumerate(events) if again[index] for s in event.allocates}
        self._remade = remade
        self._unasked = self._find_unasked(again)
        entries, over = self._entries(), self._find_written_over()
        released: dict[int, set[int]] = {}  # by event: the storages that autograd lets go of after it
        for save in saved.saves:
            if save.storage in remade and save.unpacked and save.released is not None:
                released.setdefault(save.released, set()).add(save.storage)
        backward = False
        unit_at = {at: saved.saves[number].unit for number, at in saved.unpacked}
        pending: set[int] = set()  # storages that were asked for since the last row
        asking = ROOT  # the unit whose nodes asked for them
        for index, (event, made) in enumerate(zip(events, saved.made, strict=True)):
            backward = backward or (event.backward and index >= saved.forward_events)
            if index in entries:
                pending |= entries[index]
                asking = unit_at[index]
            let_go = released.get(index, set())
            if not (event.allocates or made.written or let_go):  # a node unpacks all that it reads at once
                self._row_of.append(len(self.rows) - 1)
                continue
            unit = asking if pending else made.unit
            self._row(index, event, made, backward, again[index], pending, let_go, Region(unit))
            pending = set()
            self._row_of.append(len(self.rows) - 1)
            if index in over:
                self.written_over[base_op(len(self.rows) - 1)] = over[index]
                there = Op(
                    (),
                    (),
                    phase=Phase(backward),
                    region=GLUE_REGION,
                    name=f"result of {self.rows[-1].op.name}",
                )
                self.rows.append(_Row(-1, there, ()))
                self.sources.append(Source())
        self._hold()
        forward = [op for op in self.replayed.ops if not op.backward]
        self.replayed.forward_length = len(forward)
        names = "\n".join(f"{op.name} {op.module}" for op in self.replayed.ops)
        sizes = [storage.bytes for storage in self.storages]
        self.replayed.structure = hashlib.sha256(names.encode()).hexdigest()
        self.replayed.fingerprint = hashlib.sha256(f"{names} {sizes}".encode()).hexdigest()

    def _find_unasked(self, again: Sequence[bool]) -> set[int]:
        """The saves that no node asks for and that are made on demand if a backward of another loss does: of
        what is there to the end, without states of generators that the problem would have to count."""
        if self.saved.unit_of:  # by then their parameters need not be gathered
            return set()
        made, writers = self.saved.made, self._repeatable.writers
        found = {s for s, storage in enumerate(self.storages) if storage.died_after is None}
        for index, event in enumerate(self.events):
            if not again[index]:
                continue
            before = self._repeatable.read_before_writes(index)
            calls = [*before.values(), index, *(w for s in event.allocates for w in writers.get(s, ()))]
            own = {-1, *before, *event.allocates}
            states = self._state_bytes() and any(map(self._draws, calls))
            if not states and all(s in found or s in own for c in calls for s in made[c].operands):
                found.update(event.allocates)
        found &= self._remade
        return {
            number
            for number, save in enumerate(self.saved.saves)
            if save.storage in found
            and self.storages[save.storage].died_after is not None
            and not save.unpacked
            and all(made[w].position < save.begun for w in writers.get(save.storage, ()))
        }

    def _find_written_over(self) -> dict[int, int]:
        """By event the save over which its result can be written: autograd and Python have let go of all that
        shares its memory by then."""
        found: dict[int, int] = {}
        if self.device.kind != "cpu":
            return found  # other kernels were not looked at
        last: dict[int, list[int | None]] = {}  # by storage: when it was let go of
        for save in self.saved.saves:
            last.setdefault(save.storage, []).append(save.released)
        for number, save in enumerate(self.saved.saves):
            asked = len(save.unpacked) == 1 and not save.by_python
            if save.storage not in self._remade or not asked or save.released is None:
                continue
            reading = [
                at
                for at in range(save.unpacked[0], save.released + 1)
                if save.storage in self.saved.made[at].operands and self._func(at) is not DETACH
            ]
            if len(reading) != 1:  # what reads a view of it is another call
                continue
            (at,) = reading
            ends = [*last[save.storage], self.storages[save.storage].died_after]
            ends.remove(save.released)
            if any(end is None or end > at for end in ends):
                continue
            args = self.recording.calls[self._call_of(at)].args
            if can_write_over(self._func(at), args) and args[1].numel() >= LEAST_ELEMENTS:
                (gradient, read), (made,) = self.saved.made[at].operands[:2], self.events[at].allocates
                if read == save.storage != gradient and self.storages[made].died_after != at:
                    found[at] = number
        return found

    def _func(self, event: int) -> Any:
        return self.recording.calls[self._call_of(event)].func

    def _entries(self) -> dict[int, set[int]]:
        """By event the storages that nodes ask for right before it, of those that can be made again."""
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
        made: Made,
        backward: bool,
        again: bool,
        asked: set[int],
        let_go: set[int],
        region: Region,
    ) -> None:
        call = event.call
        assert call is not None
        name = str(self.recording.calls[call].func)
        outputs = tuple(self._value(s, name, made.module) for s in event.allocates)
        in_forward = made.position >= 0 and not backward and index < self.saved.forward_events
        reads = {
            s for s in (*event.reads, *asked, *let_go) if s in self.value_of and s not in event.allocates
        }
        entry = backward and bool(asked)
        source = Source()
        if in_forward or entry:
            number = len(self.replayed.ops)
            source = Source(0, 0, number)
            self._ids[index] = number
            if entry:
                self._entry_ids[len(self.rows)] = number
            self.replayed.ops.append(ReplayOp(number, name, made.module, backward, made.line))
        op = Op(
            tuple(sorted(self.value_of[s] for s in reads)),
            outputs,
            phase=Phase(backward),
            recomputable=again and in_forward,
            region=region if source.graph >= 0 else GLUE_REGION,
            name=f"{name} #{source.op}" if source.graph >= 0 else name,
            module=made.module,
            blocks=made.blocks,
        )
        writes = tuple(
            self.value_of[s] for s in made.written if s in self.value_of and s not in event.allocates
        )
        op.writes = tuple(dict.fromkeys(writes))
        self.rows.append(_Row(index, op, outputs))
        self.sources.append(source)
        if in_forward and self._draws(index) and (again or self._writes_remade(made)):
            state = ValueId(len(self.values))
            self.values.append(Value(self._state_bytes(), f"generator state of {name}", on_demand=True))
            self._states[index] = state
            op.outputs = (*outputs, state)

    def _writes_remade(self, made: Made) -> bool:
        return any(storage in self._remade for storage in made.written)

    def _draws(self, index: int) -> bool:
        made = self.saved.made[index]
        return made.position >= 0 and draws(self.saved.operators[made.position])

    def _state_bytes(self) -> int:
        return generator_state_bytes("cpu") if self.device.kind == "cpu" else 0

    def _value(self, storage: int, name: str, module: str) -> ValueId:
        value = ValueId(len(self.values))
        self.values.append(Value(self.storages[storage].bytes, f"{name} @ {module}"))
        self.value_of[storage] = value
        return value

    def _hold(self) -> None:
        """Say how long each storage lives that operations do not hold alone."""
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
        """The solvers' graph, costs for the device; each re-run takes ``again_seconds`` more."""
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
            if self.saved.made[row.event].position >= 0 and (numbers := self._number_bytes(call)):
                row.op.workspace_bytes += numbers
                if row.event in self._ids:
                    self.number_bytes[self._ids[row.event]] = numbers
            key = call, tuple(values[v].bytes for v in row.made)
            if row.made and key not in known:
                known[key] = real_sizes(calls[call], memories[call], list(key[1]))
            for value, size in zip(row.made, known.get(key, ()), strict=bool(row.made)):
                values[value] = values[value]._replace(bytes=size)
        base = [row.op for row in self.rows]
        ops = list(base)
        for i, row in enumerate(self.rows):
            if row.op.recomputable:
                again = self._again(row, row_of_event, base, memories, again_seconds)
                if again is not None:
                    ops[i] = replace(row.op, replay=RowId(len(ops)))
                    ops.append(again)
        self._write_over(ops)
        rounded = (v._replace(bytes=round_bytes(self.device, v.bytes)) for v in values)
        return Graph(tuple(ops), tuple(rounded), base_length=len(base))

    def _write_over(self, ops: list[Op]) -> None:
        """Have results written over operands that nothing needs later, what may run again included."""
        over = {row: self.saved.saves[save] for row, save in self.written_over.items()}
        held = {
            (self._row_of[save.released or 0], self.value_of[save.storage]): r for r, save in over.items()
        }
        needed = [-1] * len(self.values)  # by value: the last row of the backward that it is needed for
        for i, op in enumerate(ops[: len(self.rows)]):
            if op.phase is Phase.BACKWARD:
                for value in op.inputs:
                    needed[value] = max(needed[value], held.get((i, value), i))
        for op in reversed(ops[: len(self.rows)]):
            if op.phase is Phase.FORWARD and op.recomputable:
                again = op if op.replay is None else ops[op.replay]
                for value in again.inputs:
                    needed[value] = max(needed[value], *(needed[made] for made in again.outputs))
        for (last, value), row in held.items():
            if needed[value] != row:
                del self.written_over[row]
                continue
            ops[row], ops[row + 1] = with_outputs_of(ops[row], ops[row + 1])
            if last != row:  # by then the result is in its place
                ops[last] = replace(ops[last], inputs=tuple(v for v in ops[last].inputs if v != value))
            self.until[row] = base_op(last), value

    def _again(
        self,
        row: _Row,
        row_of_event: dict[int, BaseOp],
        base: Sequence[Op],
        memories: Sequence[OpMemory],
        more_seconds: float,
    ) -> Op | None:
        """How a row runs again, where that differs from its first run: with what writes over its results."""
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
            for s in self.saved.made[c].operands
            if s in self.value_of and s not in own and s not in before
        }
        ops = [base[row_of_event[c]] for c in (*makers, *calls)]
        state = self._state_bytes()  # put back behind the call
        taken = [memories[self._call_of(c)].workspace_bytes + state * (c in self._states) for c in calls]
        held, first = 0, 0  # what is there for this run alone: behind the makers, and at most while these run
        for maker in makers:
            makes = self.events[maker].allocates
            first = max(first, held + self._bytes_of(makes) + memories[self._call_of(maker)].workspace_bytes)
            held += self._bytes_of([s for s in makes if s in before])
        return replace(
            row.op,
            inputs=(*sorted(reads), *states),
            outputs=row.made,
            seconds=sum(op.seconds for op in ops) + len(ops) * more_seconds,
            workspace_bytes=max(max(taken) + held, first - self._bytes_of(own)),
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
        """What a call's Python numbers take as tensors beside those that the operator itself makes of them:
        under a dispatch mode PyTorch makes them twice."""
        if self.device.kind != "cpu":
            return 0
        call = self.recording.calls[number]
        numbers = operators.numbers_for_tensors(call.func, call.args) if call.args else {}
        return sum(operators.number_as_tensor(n).nbytes for n in numbers.values())

    # ---- how calls are put together ----------------------------------------------------------------------

    def wiring(self) -> ReplayRecord:
        """The calls of the module's forward, by position, and what autograd saves of them."""
        count = len(self.saved.operators)
        ids = [-1] * count
        operands: list[list[int]] = [[] for _ in range(count)]
        results, written = operands.copy(), operands.copy()
        unsure = self.saved.unsure

        def values(storages: Sequence[int]) -> list[int]:
            return [int(self.value_of.get(s, -1)) for s in storages]

        for index, made in enumerate(self.saved.made):
            if made.position >= 0:
                ids[made.position] = self._ids.get(index, -1)
                operands[made.position] = values([-1 if s in unsure else s for s in made.operands])
                born = set(self.events[index].allocates)
                results[made.position] = values([s if s in born else -1 for s in made.results])
                written[made.position] = values(made.written)
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
        taken = [  # kernels may make more than their shape functions say
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
            saved_bytes=taken,
            grad_switches=self.saved.grad_switches,
            asked=asked,
            entries=entries,
            written_over=sorted(self.written_over.values()),
        )


def replay_record(problem: ReplayProblem) -> ReplayRecord:
    """How the calls of a step are put together, as plan files store it."""
    assert problem.wiring is not None
    # As in the record of the step: by the order of production. Bits come between the problem's own values.
    made = (int(v) for op in problem.graph.ops[: problem.graph.base_length] for v in op.outputs)
    number = {v: i for i, v in enumerate(made)} | {-1: -1}
    by_value = {name: getattr(problem.wiring, name) for name in ("operands", "results", "written", "saves")}
    return problem.wiring.model_copy(
        update={name: [number[v] for v in values] for name, values in by_value.items()}
    )
