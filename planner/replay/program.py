"""From a plan to the tables that a step looks up, by position: training decides nothing.

The schedule has the calls that run again before each entry of the backward. From it follow, for each run, the
values in memory by then, the results that are used, and the values that are freed after it: the program does
what the simulator assumes.
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
class PlannedCall:
    """A call of the forward at which a step does more than run it.

    Attributes:
        noted: Whether its arguments are noted, as it runs again.
        operands: The slot of each tensor argument; -1 for one that is held itself.
        results: The results that are slots: index among the results, slot, whether the plan keeps it.
        written: The slots that it writes.
        packs: The slot of a mask that it makes, or writes last, and the slot of its bits; None without one.
        before: Calls that run again right before it, for it alone, each with the slots that it reads of their
            results: the forward writes over these later.
    """

    noted: bool
    operands: tuple[int, ...]
    results: tuple[tuple[int, int, bool], ...]
    written: tuple[int, ...]
    packs: tuple[int, int] | None = None
    before: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(slots=True)
class Run:
    """One re-run: a call, with those that write over its results.

    Attributes:
        calls: Their positions.
        store: The results that are used later: index among the results, slot.
        free: The slots that nothing uses after it.
        last_runs: The calls that run for the last time.
        bits: The slot of the bits that are unpacked instead of a run; -1 without any.
    """

    calls: tuple[int, ...]
    store: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    last_runs: tuple[int, ...] = ()
    bits: int = -1


@dataclass(slots=True)
class Program:
    """The tables that a planned step looks up.

    Attributes:
        operators: The operator of each call, as ``str(operator)`` has it.
        calls: By call: the plan's work at it; None if it just runs.
        saves: The slot of each save that is dropped; -1 for one that is kept.
        begun: For each save, the number of calls that have begun by then.
        saved_bytes: For each save, the bytes of its storage; 0 for one that existed before the step.
        grad: For each call, whether gradients are on.
        lines: For each call, the user's line that makes it; empty if that is not known.
        room: By the number of calls that have run, the bytes left below the peak.
        runs: By save, the re-runs before it is handed out.
        free: By save, the slots that are freed after it is handed out.
        makers: By slot, the positions of the call that makes it and of those that write it.
        bits: By the slot of a packed mask, the slot of its bits.
        asking_order: Places in the order of asking, of saves that are dropped, set off runs or free slots.
        written_over: The saves that the node writes its result over.
    """

    operators: tuple[str, ...]
    calls: list[PlannedCall | None]
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
    asking_order: dict[int, int] = field(default_factory=dict)
    written_over: frozenset[int] = frozenset()


def program_of(plan: PlanRecord) -> Program:
    """The program of a plan.

    Raises:
        PlanFileError: The plan contradicts itself.
    """
    assert plan.replay is not None
    return _ProgramMaker(plan, plan.replay).program()


class _Asked(NamedTuple):
    """A save that the backward asks for.

    Attributes:
        save: Its position.
        step: The step of its entry in the schedule; -1 if the schedule lacks it.
        instance: The instance of the value that the save finds; -1 if there is none.
    """

    save: int
    step: int
    instance: int


class _Rerun(NamedTuple):
    """A step of the schedule at which a call of the forward runs again."""

    step: int
    position: int


class _ProgramMaker:
    """Makes the program of a plan: its tables first, then the runs of the backward.

    Instances of values are numbered as in :func:`~solvers.model.schedule.lifetimes`.
    """

    def __init__(self, plan: PlanRecord, wiring: ReplayRecord) -> None:
        self.wiring = wiring
        simulation = simulated(plan)
        self.graph, self.schedule = simulation.graph, simulation.schedule
        self.timeline, self.line_of = simulation.timeline, simulation.line
        places = simulation.step.places()
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
        self.on_demand, self.held_on_demand = self._on_demand()

    def program(self) -> Program:
        wiring = self.wiring
        dropped = {a.save for a in self.asked}
        # A save that finds the forward's own value is kept.
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
        program.written_over = frozenset(wiring.written_over)
        known = {*dropped, *program.runs, *program.free}
        seen = [a.save for a in self.asked if a.save in known]
        program.asking_order = {save: place for place, save in enumerate(dict.fromkeys(seen))}
        _check(program)
        return program

    # ---- tables of the plan ------------------------------------------------------------------------------

    def _makers(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """By value, the position of the call that makes it, and those of the calls that write over it."""
        maker = {value: p for p, values in enumerate(self.results) for value in values if value >= 0}
        writers: dict[int, list[int]] = {}
        for position, values in enumerate(self.written):
            for value in values:
                if value >= 0 and maker.get(value, position) != position:
                    writers.setdefault(value, []).append(position)
        return maker, writers

    def _bits(self, packed: set[int]) -> dict[int, int]:
        """By the position of a call that makes a packed mask, the value of its bits."""
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

    # ---- values and instances ----------------------------------------------------------------------------

    def _instance(self, value: int, step: int) -> int:
        """The instance of a value that exists at a step; -1 if there is none."""
        earlier = [i for i in self.instances.get(value, ()) if self.start_of[i] < step]
        return earlier[-1] if earlier else -1

    def _is_run_again(self, instance: int) -> bool:
        return instance >= 0 and self.start_of[instance] >= self.graph.forward_length

    def _calls_of(self, position: int) -> tuple[int, ...]:
        """The calls of a re-run: the one that makes its results, and those that write over them."""
        values = (v for v in self.results[position] if v >= 0)
        return (position, *sorted({w for v in values for w in self.writers.get(v, ())}))

    def _before(self, position: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The calls that run right before a re-run: they make values that the forward writes over later."""
        own, found = set(self.results[position]), dict[int, list[int]]()
        for value in dict.fromkeys(self.operands[position]):
            writers = self.writers.get(value, ())
            if value not in own and max(writers, default=-1) > position:
                if position not in writers and min(writers) < position:
                    between = f"call {position} runs again and reads value {value} between two writes"
                    raise PlanFileError(f"plan: replay: {between}")
                found.setdefault(self.maker[value], []).append(value)
        return tuple((maker, tuple(values)) for maker, values in sorted(found.items()))

    def _noted_for(self, position: int) -> tuple[int, ...]:
        """All calls of a re-run, those before it included."""
        return (*(maker for maker, _ in self._before(position)), *self._calls_of(position))

    def _on_demand(self) -> tuple[set[int], set[int]]:
        """The calls that make saves that no node asks for; and the values that these calls begin with, which
        live to the end of the step. The schedule lacks them: only a backward of another loss asks."""
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
        """The values that a re-run reads. Recipes hold other storages, that no counted call made."""
        if position in self.bits:
            yield self.bits[position]
        else:
            yield from self._given_to(position)

    def _given_to(self, position: int) -> Iterator[int]:
        own = {*self.results[position], *(v for _, values in self._before(position) for v in values)}
        for call in self._noted_for(position):
            yield from (v for v in self.operands[call] if v in self.maker and v not in own)

    def _slots(self) -> tuple[set[int], set[int]]:
        """The values that are slots: re-runs make or read them; and those whose first instance they read."""
        positions = self.on_demand.union(position for _, position in self.reruns)
        slots = {v for position in positions for v in self.results[position] if v >= 0}
        slots |= {v for p in positions - self.bits.keys() for _, values in self._before(p) for v in values}
        kept = set(self.held_on_demand)
        slots |= kept
        for step, position in self.reruns:
            for value in self._read_by(position):
                slots.add(value)
                instance = self._instance(value, step)
                if instance >= 0 and not self._is_run_again(instance):
                    kept.add(value)
        return slots, kept

    def _last_uses(self) -> dict[int, tuple[int, int, int]]:
        """The last use of each instance: (step, 0, 0) by a re-run; (step, place + 1, save) by a save, handed
        out after the re-runs of its step."""
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
        """Let the call that makes a mask, or writes it last, pack it."""
        for position, slot in self.bits.items():
            mask = next(v for v in self.results[position] if v >= 0)
            program.bits[mask] = slot
            last = self._calls_of(position)[-1]
            call = program.calls[last] or PlannedCall(False, self.operands[last], (), ())
            call.packs = (mask, slot)
            program.calls[last] = call

    def _run_again(self, program: Program) -> None:
        """Put each re-run before the first save of its entry, and free slots after their last use."""
        last_use = self._last_uses()
        free_at: dict[int, list[int]] = {}
        for instance, (step, place, save) in last_use.items():
            value = self.value_of[instance]
            if value in self.held_on_demand:  # it lives to the end
                continue
            if place:
                program.free[save] = (*program.free.get(save, ()), value)
            else:
                free_at.setdefault(step, []).append(value)
        trigger: dict[int, int] = {}  # by the step of an entry: the save that sets off its re-runs
        for save, step, _ in self.asked:
            if step not in trigger or (program.saves[trigger[step]] < 0 <= program.saves[save]):
                trigger[step] = save
        entries = sorted(step for step in trigger if step >= 0)
        made_at = {key: i for i, key in enumerate(zip(self.value_of, self.start_of, strict=True))}
        last_run = {
            call: step
            for step, position in self.reruns
            if position not in self.bits
            for call in self._noted_for(position)
        }
        for position in self.on_demand:
            last_run.update(dict.fromkeys(self._noted_for(position), -1))  # never freed
        for step, position in self.reruns:
            entry = next((e for e in entries if e > step), None)
            if entry is None:
                continue
            store = [
                (j, value)
                for j, value in enumerate(self.results[position])
                if value not in self.held_on_demand and made_at.get((value, step)) in last_use
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
            row = self.row_of.get(op, -1)  # in the forward, steps of the schedule are rows
            room.append(room[-1] if row < 0 else peak - int(self.timeline.live_bytes[row]))
        return room

    def _call(self, position: int, recorded: set[int], slots: set[int], kept: set[int]) -> PlannedCall | None:
        results = tuple(
            (j, value, value in kept)
            for j, value in enumerate(self.results[position])
            if value in slots and value >= 0
        )
        written = tuple(v if v in slots else -1 for v in self.written[position])
        if position not in recorded and not results and max(written, default=-1) < 0:
            return None
        operands = tuple(v if v in slots else -1 for v in self.operands[position])
        before = self._before(position) if position in recorded else ()
        return PlannedCall(position in recorded, operands, results, written, before=before)


def _check(program: Program) -> None:
    """Follow a program as a step does.

    Raises:
        PlanFileError: A re-run, or a save that is handed out, lacks a slot that it needs.
    """
    calls = program.calls
    filled = {slot for call in calls if call is not None for _, slot, kept in call.results if kept}
    filled |= set(program.bits.values())

    def need(slot: int, reader: str) -> None:
        if slot >= 0 and slot not in filled:
            raise PlanFileError(f"plan: replay: {reader} needs value {slot}, which is not there by then")

    for save in program.asking_order:
        for run in program.runs.get(save, ()):
            need(run.bits, f"save {save}")
            own = set[int]()
            first = calls[run.calls[0]]
            before = {} if first is None or run.bits >= 0 else dict(first.before)
            for position in (*before, *run.calls) if run.bits < 0 else ():
                call = calls[position]
                if call is None or not call.noted:
                    raise PlanFileError(f"plan: replay: call {position} runs again and is not noted")
                own.update(before.get(position, (slot for _, slot, _ in call.results)))
                for slot in call.operands:
                    if slot not in own:
                        need(slot, f"call {position}, which runs again,")
            filled.update(slot for _, slot in run.store)
            filled.difference_update(run.free)
        need(program.saves[save], f"save {save}")
        filled.difference_update(program.free.get(save, ()))


def _ragged(counts: Sequence[int], flat: Sequence[int]) -> list[tuple[int, ...]]:
    ends = np.cumsum([0, *counts]).tolist()
    return [tuple(flat[a:b]) for a, b in itertools.pairwise(ends)]
