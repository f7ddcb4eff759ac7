"""From a plan to what its forward and backward look up: decisions by position, none made while training.

The schedule says which calls run again before which entry of the backward. Of each run follows which values
are in memory by then, which of its results are used, and which values are let go of behind it: what the
simulator assumes is what the program does.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
        before: The calls that run again right before it, for it alone, each with the slots that it reads of
            them: what is in these is written over later.
    """

    recorded: bool
    operands: tuple[int, ...]
    results: tuple[tuple[int, int, bool], ...]
    written: tuple[int, ...]
    packs: tuple[int, int] | None = None
    before: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(slots=True)
class Run:
    """One call, with those that write over its results, that is run again.

    Attributes:
        calls: Their positions.
        bits: The slot of the bits that are unpacked instead; -1: none.
        store: Results that are used later: position among the results, slot.
        free: Slots that nobody uses behind it.
        done: The calls that run for the last time.
    """

    calls: tuple[int, ...]
    store: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    done: tuple[int, ...] = ()
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
        over: The saves that the node writes its result over.
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
    over: frozenset[int] = frozenset()


def program_of(plan: PlanRecord) -> Program:
    """The program of a plan.

    Raises:
        PlanFileError: The plan does not hold together.
    """
    assert plan.replay is not None
    return _Maker(plan, plan.replay).program()


class _Asked(NamedTuple):
    """A save that the backward asks for.

    Attributes:
        save: Its position.
        step: The step of the entry that asks; -1: of none that the schedule has.
        instance: The instance of the value that it finds; -1: none.
    """

    save: int
    step: int
    instance: int


class _Rerun(NamedTuple):
    """A step of the schedule at which a call of the forward runs again."""

    step: int
    position: int


class _Maker:
    """Makes the program of a plan: its tables first, then the runs of the backward.

    A value that is run again exists several times in a schedule. Each time is an *instance*, numbered in the
    order of :func:`~solvers.model.schedule.lifetimes`.
    """

    def __init__(self, plan: PlanRecord, wiring: ReplayRecord) -> None:
        self.wiring = wiring
        again = simulated(plan)
        self.graph, self.schedule = again.graph, again.schedule
        self.timeline, self.line_of = again.timeline, again.line
        places = again.step.places()
        self.row_of = {op: row for row, (graph, _, op) in enumerate(places) if graph == 0}
        self.operands = _ragged(wiring.operand_counts, wiring.operands)
        self.results = _ragged(wiring.result_counts, wiring.results)
        self.written = _ragged(wiring.written_counts, wiring.written)
        lives = lifetimes(self.graph, self.schedule)
        self.start_of, self.value_of = lives.start.tolist(), lives.value.tolist()
        self.instances: dict[int, list[int]] = {}
        for instance, value in enumerate(self.value_of):
            self.instances.setdefault(value, []).append(instance)
        self.maker, self.writers = self._makers()
        self.bits = self._bits(set(plan.graphs[0].packed))
        self.step_of_row, self.reruns = self._steps()
        self.asked = [self._asked(save, op) for save, op in zip(wiring.asked, wiring.entries, strict=True)]
        self.unasked = {s for s, v in enumerate(wiring.saves) if v in self.maker}.difference(wiring.asked)
        self.on_demand, self.held_for_them = self._on_demand()

    def program(self) -> Program:
        wiring = self.wiring
        dropped = {a.save for a in self.asked}
        dropped -= {a.save for a in self.asked if not self._is_run_again(a.instance)}
        all_dropped = dropped | self.unasked
        saves = [value if save in all_dropped else -1 for save, value in enumerate(wiring.saves)]
        again = {p for _, p in self.reruns if p not in self.bits} | self.on_demand
        recorded = {c for p in again for c in self._noted_for(p)}
        slots, kept = self._slots()
        calls = [self._call(p, recorded, slots, kept) for p in range(len(wiring.operators))]
        rows = [self.row_of.get(op, -1) for op in wiring.ids]
        program = Program(
            tuple(wiring.operators),
            calls,
            saves,
            list(wiring.begun),
            list(wiring.saved_bytes),
            self._grad(),
            [self.line_of(row) if row >= 0 else "" for row in rows],
            self._room(),
            makers={v: (self.maker[v], *self.writers.get(v, ())) for v in slots if v in self.maker},
        )
        self._pack(program)
        self._run_again(program)
        program.over = frozenset(wiring.written_over)
        known = {*dropped, *program.runs, *program.free}
        seen = [a.save for a in self.asked if a.save in known]
        program.order = {save: place for place, save in enumerate(dict.fromkeys(seen))}
        _check(program)
        return program

    # ---- what the plan says ------------------------------------------------------------------------------

    def _makers(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """By value, the position of the call that makes it, and of those that write over it."""
        maker: dict[int, int] = {}
        for position, values in enumerate(self.results):
            for value in values:
                if value >= 0:
                    maker.setdefault(value, position)
        writers: dict[int, list[int]] = {}
        for position, values in enumerate(self.written):
            for value in values:
                if value >= 0 and maker.get(value, position) != position:
                    writers.setdefault(value, []).append(position)
        return maker, writers

    def _bits(self, packed: set[int]) -> dict[int, int]:
        """The bits of masks that are packed, by the position of the call that makes the mask."""
        bits: dict[int, int] = {}
        for position, op in enumerate(self.wiring.ids):
            row = self.row_of.get(op) if op in packed else None
            replay = None if row is None else self.graph.ops[RowId(row)].replay
            if replay is None:
                continue
            if max(self.results[position], default=-1) < 0 or not self.graph.ops[replay].inputs:
                raise PlanFileError(f"plan: replay: call {position} is packed, and makes nothing")
            bits[position] = int(self.graph.ops[replay].inputs[0])
        if len({*bits.values(), *self.maker}) != len(bits) + len(self.maker):
            raise PlanFileError("plan: replay: the bits of a mask are those of another, or no bits")
        return bits

    def _steps(self) -> tuple[dict[int, int], list[_Rerun]]:
        """The step at which each base row runs first, and the steps at which calls run again."""
        graph = self.graph
        position_of = {self.row_of[op]: i for i, op in enumerate(self.wiring.ids) if op in self.row_of}
        first: dict[int, int] = {}
        reruns: list[_Rerun] = []
        for step, row in enumerate(self.schedule.tolist()):
            base = int(graph.base_of[row])
            if row < graph.base_length and base not in first:
                first[base] = step
            elif base in position_of:
                reruns.append(_Rerun(step, position_of[base]))
        return first, reruns

    def _asked(self, save: int, entry: int) -> _Asked:
        step = self.step_of_row.get(self.row_of.get(entry, -1), -1)
        return _Asked(save, step, self._instance(self.wiring.saves[save], step) if step >= 0 else -1)

    # ---- what follows from it ----------------------------------------------------------------------------

    def _instance(self, value: int, step: int) -> int:
        """The instance of a value that a step finds; -1: none."""
        there = [i for i in self.instances.get(value, ()) if self.start_of[i] < step]
        return there[-1] if there else -1

    def _is_run_again(self, instance: int) -> bool:
        return instance >= 0 and self.start_of[instance] >= self.graph.forward_length

    def _calls_of(self, position: int) -> tuple[int, ...]:
        """The calls of a run: the one that makes its results, and those that write over them."""
        values = (v for v in self.results[position] if v >= 0)
        return (position, *sorted({w for v in values for w in self.writers.get(v, ())}))

    def _before(self, position: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The calls that run again right before a run's first, as it reads what is written over later."""
        own, found = set(self.results[position]), dict[int, list[int]]()
        for value in dict.fromkeys(self.operands[position]):
            if value not in own and max(self.writers.get(value, ()), default=-1) > position:
                found.setdefault(self.maker[value], []).append(value)
        return tuple((maker, tuple(values)) for maker, values in sorted(found.items()))

    def _noted_for(self, position: int) -> tuple[int, ...]:
        """All calls that a run consists of."""
        return (*(maker for maker, _ in self._before(position)), *self._calls_of(position))

    def _on_demand(self) -> tuple[set[int], set[int]]:
        """The calls that make what autograd saves and no node asks for, and what these read; and the values
        at which that ends, as they are there to the end of the step. No schedule has such calls: a backward
        of another loss asks for what they make."""
        found, held = set[int](), set[int]()
        values, until = self.graph.held_table
        to_the_end = set(values[until == self.graph.base_length - 1].tolist())
        pending = [self.wiring.saves[save] for save in self.unasked]
        while pending:
            value = pending.pop()
            if self.graph.recompute_row[value] < 0 or value in to_the_end:
                held.add(value)
            elif (position := self.maker[value]) not in found:
                found.add(position)
                pending += self._given_to(position)
        return found, held

    def _read_by(self, position: int) -> Iterator[int]:
        """The values that a run reads, but for what no counted call made: a run's arguments hold that."""
        if position in self.bits:
            yield self.bits[position]
        else:
            yield from self._given_to(position)

    def _given_to(self, position: int) -> Iterator[int]:
        own = {*self.results[position], *(v for _, values in self._before(position) for v in values)}
        for call in self._noted_for(position):
            yield from (v for v in self.operands[call] if v in self.maker and v not in own)

    def _slots(self) -> tuple[set[int], set[int]]:
        """The values that the program knows, which are results of runs and what runs read; and those of them
        whose first instance a run reads."""
        positions = self.on_demand.union(position for _, position in self.reruns)
        slots = {v for position in positions for v in self.results[position] if v >= 0}
        slots |= {v for p in positions - self.bits.keys() for _, values in self._before(p) for v in values}
        kept = set(self.held_for_them)
        slots |= kept
        for step, position in self.reruns:
            for value in self._read_by(position):
                slots.add(value)
                instance = self._instance(value, step)
                if instance >= 0 and not self._is_run_again(instance):
                    kept.add(value)
        return slots, kept

    def _last_uses(self) -> dict[int, tuple[int, int, int]]:
        """What uses each instance last: its step, and for a save, which is handed out behind the runs of that
        step, one more than its place among those asked for, and the save."""
        last: dict[int, tuple[int, int, int]] = {}

        def use(instance: int, by: tuple[int, int, int]) -> None:
            last[instance] = max(last.get(instance, (-1, 0, 0)), by)

        for step, position in self.reruns:
            for value in self._read_by(position):
                if (instance := self._instance(value, step)) >= 0:
                    use(instance, (step, 0, 0))
        for place, (save, step, instance) in enumerate(self.asked):
            if self._is_run_again(instance):
                use(instance, (step, place + 1, save))
        return last

    # ---- the program -------------------------------------------------------------------------------------

    def _pack(self, program: Program) -> None:
        """Have the call that makes a mask, or writes it last, pack it."""
        for position, slot in self.bits.items():
            mask = next(v for v in self.results[position] if v >= 0)
            program.bits[mask] = slot
            last = self._calls_of(position)[-1]
            call = program.calls[last] or Call(False, self.operands[last], (), ())
            call.packs = (mask, slot)
            program.calls[last] = call

    def _run_again(self, program: Program) -> None:
        """Put each run before the save that its entry of the backward asks for first, and let go of what
        nobody uses behind it."""
        last_use = self._last_uses()
        free_at: dict[int, list[int]] = {}
        for instance, (step, place, save) in last_use.items():
            value = self.value_of[instance]
            if value in self.held_for_them:  # it is there, and stays
                continue
            if place:
                program.free[save] = (*program.free.get(save, ()), value)
            else:
                free_at.setdefault(step, []).append(value)
        trigger: dict[int, int] = {}  # by the step of an entry: the save that sets off its runs
        for save, step, _ in self.asked:
            if step not in trigger or (program.saves[trigger[step]] < 0 <= program.saves[save]):
                trigger[step] = save
        entries = sorted(step for step in trigger if step >= 0)
        made_at = {
            (value, start): i
            for i, (value, start) in enumerate(zip(self.value_of, self.start_of, strict=True))
        }
        last_run = {
            call: step
            for step, position in self.reruns
            if position not in self.bits
            for call in self._noted_for(position)
        }
        for position in self.on_demand:
            last_run.update(dict.fromkeys(self._noted_for(position), -1))  # these stay
        for step, position in self.reruns:
            entry = next((e for e in entries if e > step), None)
            if entry is None:
                continue
            store = [
                (j, value)
                for j, value in enumerate(self.results[position])
                if value not in self.held_for_them and made_at.get((value, step)) in last_use
            ]
            run = Run(
                self._calls_of(position),
                tuple(store),
                tuple(free_at.get(step, ())),
                tuple(c for c in self._noted_for(position) if last_run.get(c) == step),
                self.bits.get(position, -1),
            )
            program.runs.setdefault(trigger[entry], []).append(run)

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

    def _call(self, position: int, recorded: set[int], slots: set[int], kept: set[int]) -> Call | None:
        results = tuple(
            (j, value, value in kept)
            for j, value in enumerate(self.results[position])
            if value in slots and value >= 0
        )
        written = tuple(v if v in slots else -1 for v in self.written[position])
        if position not in recorded and not results and max(written, default=-1) < 0:
            return None
        operands = tuple(v if v in slots else -1 for v in self.operands[position])
        again = position in recorded
        return Call(again, operands, results, written, before=self._before(position) if again else ())


def _check(program: Program) -> None:
    """Follow a program as a step does: what runs again, or is handed out, finds what it needs.

    Raises:
        PlanFileError: It does not.
    """
    calls = program.calls
    there = {slot for call in calls if call is not None for _, slot, kept in call.results if kept}
    there |= set(program.bits.values())

    def need(slot: int, what: str) -> None:
        if slot >= 0 and slot not in there:
            raise PlanFileError(f"plan: replay: {what} needs value {slot}, which is not there by then")

    for save in program.order:
        for run in program.runs.get(save, ()):
            need(run.bits, f"save {save}")
            own = set[int]()
            first = calls[run.calls[0]]
            before = {} if first is None or run.bits >= 0 else dict(first.before)
            for position in (*before, *run.calls) if run.bits < 0 else ():
                call = calls[position]
                if call is None or not call.recorded:
                    raise PlanFileError(f"plan: replay: call {position} runs again and is not noted")
                own.update(before.get(position, (slot for _, slot, _ in call.results)))
                for slot in call.operands:
                    if slot not in own:
                        need(slot, f"call {position}, which runs again,")
            there.update(slot for _, slot in run.store)
            there.difference_update(run.free)
        need(program.saves[save], f"save {save}")
        there.difference_update(program.free.get(save, ()))


def _ragged(counts: Sequence[int], flat: Sequence[int]) -> list[tuple[int, ...]]:
    ends = np.cumsum([0, *counts]).tolist()
    return [tuple(flat[a:b]) for a, b in itertools.pairwise(ends)]
