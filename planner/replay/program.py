"""From a plan to what its forward and backward look up: decisions by position, none made while training.

The schedule says which calls run again before which entry of the backward. Of each run follows which values
are in memory by then, which of its results are used, and which values are let go of behind it: what the
simulator assumes is what the program does.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.errors import PlanFileError
from planner.planfile.plan import PlanRecord
from planner.planfile.replay_record import ReplayRecord
from planner.planfile.simulated import simulated
from solvers.model.indices import RowId
from solvers.model.schedule import lifetimes


@dataclass(slots=True)
class Call:
    """What is done at a call of the forward that the plan has something to do with.

    Attributes:
        recorded: Whether it is run again, so that its arguments are noted.
        packs: The slots of a mask that it writes last, or makes, and of its bits; None for none.
        operands: For each tensor argument the slot that it lies in; -1: it is held itself.
        results: The results that are slots: position among the results, slot, whether the plan keeps it.
        written: Slots that it writes.
    """

    recorded: bool
    operands: tuple[int, ...]
    results: tuple[tuple[int, int, bool], ...]
    written: tuple[int, ...]
    packs: tuple[int, int] | None = None


@dataclass(slots=True)
class Run:
    """One call, with those that write over its results, that is run again.

    Attributes:
        calls: Their positions.
        bits: The slot of the bits that are unpacked instead; -1: none.
        store: Results that are used later: position among the results, slot.
        free: Slots that nobody uses behind it.
        last: Whether it is the last time.
    """

    calls: tuple[int, ...]
    store: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    last: bool = False
    bits: int = -1


@dataclass(slots=True)
class Program:
    """What a planned step looks up.

    Attributes:
        operators: The operator of each call, as ``str(operator)`` has it.
        calls: What is done at each; None: it just runs.
        saves: For each save the slot that is dropped; -1: it is kept.
        begun: For each save how many calls have begun by then.
        saved_bytes: For each save the bytes of its memory; 0 where that was there before.
        grad: For each call whether gradients are on.
        lines: For each call the user's line that makes it; empty where it is not known.
        room: By the number of calls that came, the bytes that are left up to the peak.
        runs: By save, what runs again when it is asked for, before it is handed out.
        free: By save, the slots that are let go of when it was handed out.
        makers: By slot, the positions of the call that makes it and of those that write it.
        bits: By the slot of a mask that is packed, the slot of its bits.
        order: The place of each save that is dropped, or sets off runs, among these as the backward asks.
    """

    operators: tuple[str, ...]
    calls: list[Call | None]
    saves: list[int]
    begun: list[int]
    saved_bytes: list[int]
    grad: list[bool]
    lines: list[str]
    room: list[int]
    runs: dict[int, list[Run]] = field(default_factory=dict)
    free: dict[int, tuple[int, ...]] = field(default_factory=dict)
    makers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    bits: dict[int, int] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)


def program_of(plan: PlanRecord) -> Program:
    """The program of a plan.

    Raises:
        PlanFileError: The plan does not hold together.
    """
    assert plan.replay is not None
    return _Maker(plan, plan.replay).program()


class _Maker:
    def __init__(self, plan: PlanRecord, wiring: ReplayRecord) -> None:
        self.wiring = wiring
        again = simulated(plan)
        self.graph, self.schedule = again.graph, again.schedule
        self.timeline, self.line_of = again.timeline, again.line
        self.packed = plan.graphs[0].packed
        places = again.step.places()
        self.row_of = {op: row for row, (graph, _, op) in enumerate(places) if graph == 0}
        self.operands = _ragged(wiring.operand_counts, wiring.operands)
        self.results = _ragged(wiring.result_counts, wiring.results)
        self.written = _ragged(wiring.written_counts, wiring.written)
        self.position_of = {
            self.row_of[op]: position for position, op in enumerate(wiring.ids) if op in self.row_of
        }

    def program(self) -> Program:
        wiring, graph, schedule = self.wiring, self.graph, self.schedule
        lives = lifetimes(graph, schedule)
        start_of = lives.start.tolist()
        by_value: dict[int, list[int]] = {}
        for i, value in enumerate(lives.value.tolist()):
            by_value.setdefault(value, []).append(i)
        forward = graph.forward_length
        base_of = graph.base_of

        def instance(value: int, step: int) -> int:
            """Which instance of a value a step finds."""
            there = [i for i in by_value.get(value, ()) if start_of[i] < step]
            return there[-1] if there else -1

        step_of_row: dict[int, int] = {}
        reruns: list[tuple[int, int]] = []  # steps, and the positions of calls
        for step, row in enumerate(schedule.tolist()):
            base = int(base_of[row])
            if row < graph.base_length and base not in step_of_row:
                step_of_row[base] = step
            elif base in self.position_of:
                reruns.append((step, self.position_of[base]))
        writers: dict[int, list[int]] = {}
        maker: dict[int, int] = {}
        for position, values in enumerate(self.results):
            for value in values:
                if value >= 0:
                    maker.setdefault(value, position)
        for position, values in enumerate(self.written):
            for value in values:
                if value >= 0 and maker.get(value, position) != position:
                    writers.setdefault(value, []).append(position)

        # Masks that are packed, by the position of the call that makes them: their bits.
        packed = set(self.packed)
        bits: dict[int, int] = {}
        for position, op in enumerate(wiring.ids):
            replay = graph.ops[RowId(self.row_of[op])].replay if op in packed else None
            if replay is not None:
                bits[position] = int(graph.ops[replay].inputs[0])

        if len({*bits.values(), *maker}) != len(bits) + len(maker):
            raise PlanFileError("plan: replay: the bits of a mask are those of another, or no bits")

        def read_by(position: int) -> Iterator[int]:
            """The values that a run reads, but for what no counted call made: a run's arguments hold that."""
            if position in bits:
                yield bits[position]
                return
            own = set(self.results[position])
            for call in calls_of(position):
                yield from (v for v in self.operands[call] if v in maker and v not in own)

        def calls_of(position: int) -> tuple[int, ...]:
            over = sorted({w for v in self.results[position] if v >= 0 for w in writers.get(v, ())})
            return (position, *over)

        # What uses each instance last: a run, by its step, or a save, which is handed out behind the runs.
        last_use: dict[int, tuple[int, int, int]] = {}
        for step, position in reruns:
            for value in read_by(position):
                if (i := instance(value, step)) >= 0:
                    last_use[i] = max(last_use.get(i, (-1, 0, 0)), (step, 0, 0))
        saves = list(wiring.saves)
        asked: list[tuple[int, int, int]] = []  # saves, the steps of their entries, and instances
        for order, (save, op) in enumerate(zip(wiring.asked, wiring.entries, strict=True)):
            row = self.row_of.get(op, -1)
            step = step_of_row.get(row, -1)
            i = instance(wiring.saves[save], step) if step >= 0 else -1
            asked.append((save, step, i))
            if i < 0 or start_of[i] < forward:
                saves[save] = -1
            else:
                last_use[i] = max(last_use.get(i, (-1, 0, 0)), (step, order + 1, save))
        never = set(range(len(saves))) - {save for save, _, _ in asked}
        for save in never:
            saves[save] = -1

        recorded = {c for _, position in reruns if position not in bits for c in calls_of(position)}
        slots = {v for _, position in reruns for v in self.results[position] if v >= 0}
        kept: dict[int, int] = {}  # by slot: the step of the last run that reads its first instance
        for step, position in reruns:
            for value in read_by(position):
                slots.add(value)
                i = instance(value, step)
                if i >= 0 and start_of[i] < forward:
                    kept[value] = step
        program = Program(
            tuple(wiring.operators),
            [self._call(p, recorded, slots, kept) for p in range(len(wiring.operators))],
            saves,
            list(wiring.begun),
            list(wiring.saved_bytes),
            self._grad(),
            [self.line_of(row) if (row := self.row_of.get(op, -1)) >= 0 else "" for op in wiring.ids],
            self._room(),
        )
        for position, slot in bits.items():
            mask = next(v for v in self.results[position] if v >= 0)
            program.bits[mask] = slot
            last = calls_of(position)[-1]
            call = program.calls[last] or Call(False, self.operands[last], (), ())
            call.packs = (mask, slot)
            program.calls[last] = call
        for value in slots:
            if value in maker:
                program.makers[value] = (maker[value], *writers.get(value, ()))

        last_of = {position: step for step, position in reruns}
        entry_steps = sorted({step for _, step, _ in asked if step >= 0})
        trigger: dict[int, int] = {}  # by the step of an entry: the save that sets off its runs
        for save, step, _ in asked:
            if step not in trigger or (saves[trigger[step]] < 0 <= saves[save]):
                trigger[step] = save
        free_at: dict[int, list[int]] = {}
        for i, (step, order, save) in last_use.items():
            value = int(lives.value[i])
            if order:
                program.free[save] = (*program.free.get(save, ()), value)
            else:
                free_at.setdefault(step, []).append(value)
        for step, position in reruns:
            entry = next((e for e in entry_steps if e > step), None)
            if entry is None:
                continue
            store = []
            free = free_at.get(step, [])
            for j, value in enumerate(self.results[position]):
                if value < 0:
                    continue
                i = next((i for i in by_value[value] if start_of[i] == step), -1)
                if i in last_use:
                    store.append((j, value))
            run = Run(
                calls_of(position),
                tuple(store),
                tuple(free),
                last_of[position] == step,
                bits.get(position, -1),
            )
            program.runs.setdefault(trigger[entry], []).append(run)
        seen = [
            save for save, _, _ in asked if saves[save] >= 0 or save in program.runs or save in program.free
        ]
        program.order = {save: place for place, save in enumerate(dict.fromkeys(seen))}
        return program

    def _grad(self) -> list[bool]:
        ends = [*self.wiring.grad_switches, len(self.wiring.operators)]
        counts = np.diff([0, *ends])
        return [number % 2 == 0 for number, count in enumerate(counts) for _ in range(count)]

    def _room(self) -> list[int]:
        peak = self.timeline.peak_bytes
        room = [peak]
        for op in self.wiring.ids:
            row = self.row_of.get(op, -1)  # in the forward the steps of a schedule are its rows
            room.append(room[-1] if row < 0 else peak - int(self.timeline.live_bytes[row]))
        return room

    def _call(self, position: int, recorded: set[int], slots: set[int], kept: dict[int, int]) -> Call | None:
        results = tuple(
            (j, value, value in kept)
            for j, value in enumerate(self.results[position])
            if value in slots and value >= 0
        )
        written = tuple(v if v in slots else -1 for v in self.written[position])
        if position not in recorded and not results and max(written, default=-1) < 0:
            return None
        operands = tuple(v if v in slots else -1 for v in self.operands[position])
        return Call(position in recorded, operands, results, written)


def _ragged(counts: Sequence[int], flat: Sequence[int]) -> list[tuple[int, ...]]:
    ends = np.cumsum([0, *counts]).tolist()
    return [tuple(flat[a:b]) for a, b in itertools.pairwise(ends)]
