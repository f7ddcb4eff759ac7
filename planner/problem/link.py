"""When results that are kept on the host are sent and fetched, so that compute waits little.

A solver's schedule sends a result right after the row that writes it, and fetches it right before the row
that reads it. Here sends get until a later row to complete, and fetches begin at an earlier one, as far as
that saves time and raises no peak. A result takes the device's memory until the row at which its send must be
complete, and from the row at which its fetch begins. So memory is a function of the schedule, whatever the
link does.

The link carries one result after the other in each direction, in the order in which they begin.
"""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np

from planner.problem.build import Problem
from planner.problem.encodings import PackedProblem, Packing, packed
from solvers.model.arrays import Schedule
from solvers.model.indices import BaseOp, RowId, ValueId, base_op
from solvers.model.schedule import simulate


def overlapped(without: Problem, made: PackedProblem, schedule: Schedule) -> tuple[Problem, Schedule]:
    """A schedule that sends and fetches while it computes, and its problem, whose seconds count the waits.

    Args:
        without: The problem in which nothing is sent.
        made: The problem in which some results are sent, each right after the row that writes it.
        schedule: A schedule of `made`.
    """
    moved, order = _Moves(made, schedule).made()
    later = packed(without, [replace(p, completed=moved.get(p.row)) for p in made.packings])
    rows, length = later.follow(made, order), later.problem.graph.forward_length
    rows = np.concatenate((np.arange(length), rows[length:]))
    if simulate(later.problem.graph, rows).peak_bytes > simulate(made.problem.graph, schedule).peak_bytes:
        later, rows = made, schedule
    return with_waits(without, later, rows), rows


def with_waits(without: Problem, made: PackedProblem, schedule: Schedule) -> Problem:
    """The problem of a schedule, in which rows that send and fetch take as long as compute waits for them."""
    waits, runs = _waits(made, schedule), Counter(schedule.tolist())
    row_of = made.row_of
    packings = [
        replace(
            p,
            pack_seconds=p.pack_seconds + waits[row_of["pack", p.row]],
            unpack_seconds=p.unpack_seconds
            + waits[row_of["unpack", p.row]] / max(1, runs[row_of["unpack", p.row]]),
        )
        for p in made.packings
    ]
    return packed(without, packings).problem


def _waits(made: PackedProblem, schedule: Schedule) -> dict[RowId, float]:
    """The seconds for which compute waits for each row that sends or fetches."""
    graph, row_of = made.problem.graph, made.row_of
    sends = {row_of["run", p.row if p.written is None else p.written]: p for p in made.packings}
    completes = {row_of["pack", p.row]: p for p in made.packings}
    fetches = {row_of["unpack", p.row]: p for p in made.packings}
    waits: dict[RowId, float] = defaultdict(float)
    arrives: dict[ValueId, tuple[RowId, float]] = {}
    leaves: dict[RowId, float] = {}
    now = out = back = 0.0

    def wait(row: RowId, until: float) -> None:
        nonlocal now
        waits[row] += max(0.0, until - now)
        now = max(now, until)

    for row in map(RowId, schedule.tolist()):
        for value in graph.ops[row].inputs:
            if value in arrives and row not in completes:
                wait(*arrives.pop(value))
        if row in fetches:
            packing = fetches[row]
            back = max(back, now) + packing.fetch_seconds
            if packing.unpack_seconds:
                wait(row, back)
            else:
                arrives[graph.ops[row].outputs[0]] = row, back
        if row in completes:
            wait(row, leaves[completes[row].row])
        now += graph.ops[row].seconds
        if row in sends:
            out = max(out, now) + sends[row].send_seconds
            leaves[sends[row].row] = out
    return waits


class _Moves:
    """The moves of a schedule's rows that send and fetch."""

    def __init__(self, made: PackedProblem, schedule: Schedule) -> None:
        self._made, self._graph, self._rows = made, made.problem.graph, [RowId(r) for r in schedule.tolist()]
        line = simulate(self._graph, schedule)
        self._room = line.peak_bytes - line.step_bytes
        self._begin = np.concatenate(([0.0], np.cumsum(self._graph.seconds[schedule])))
        self._reads: dict[ValueId, list[int]] = defaultdict(list)  # and makes, by value, in order
        for step, row in enumerate(self._rows):
            op = self._graph.ops[row]
            for value in {*op.inputs, *op.outputs}:
                self._reads[value].append(step)

    def made(self) -> tuple[dict[RowId, BaseOp], Schedule]:
        """Behind which row of the problem without packing each send is complete, and the rows in order."""
        completed = self._sends()
        anchors = self._fetches()
        order = sorted(
            range(len(self._rows)), key=lambda step: (anchors.get(step, step), step not in anchors, step)
        )
        return completed, np.array([self._rows[step] for step in order], dtype=np.int64)

    def _sends(self) -> dict[RowId, BaseOp]:
        forms = self._made.forms
        packings: dict[RowId, Packing] = {p.row: p for p in self._made.packings}
        completed: dict[RowId, BaseOp] = {}
        free = 0.0
        for step, row in enumerate(self._rows[: self._graph.forward_length]):
            form, of = forms[row]
            if form != "pack":
                continue
            packing = packings[of]
            if packing.pack_seconds:  # a mask, whose bits are only there while it is packed
                continue
            free = max(free, float(self._begin[step])) + packing.send_seconds
            last, at = self._last_read(packing, step), step
            while at + 1 < self._graph.forward_length and self._begin[at + 1] < free:
                following = self._rows[at + 1]
                if self._graph.ops[following].region != self._graph.ops[row].region:
                    break
                if at + 1 > last and self._room[at + 1] < self._graph.values[packing.value].bytes:
                    break
                at += 1
            while at > step and not self._is_of_a_graph(self._rows[at]):
                at -= 1
            if at > step:
                self._room[max(step, last) + 1 : at + 1] -= self._graph.values[packing.value].bytes
                completed[of] = base_op(forms[self._rows[at]][1])
        return completed

    def _is_of_a_graph(self, row: RowId) -> bool:
        return self._made.forms[row][0] == "run" and self._made.problem.sources[row].graph >= 0

    def _last_read(self, packing: Packing, step: int) -> int:
        """The last step that reads the first instance of the sent value, apart from the send."""
        value, first = packing.value, self._graph.producer[packing.value]
        steps = [s for s in self._reads[value] if s != step]
        made = (s for s in steps if value in self._graph.ops[self._rows[s]].outputs)
        again = next((s for s in made if self._rows[s] != first), len(self._rows))
        held = self._graph.values[packing.value].held_until
        before = max((s for s in steps if s < again), default=step)
        return before if held is None else max(before, self._rows.index(RowId(held)))

    def _fetches(self) -> dict[int, int]:
        packings: dict[RowId, Packing] = {p.row: p for p in self._made.packings}
        anchors: dict[int, int] = {}
        begun = float("inf")
        for step in range(len(self._rows) - 1, self._graph.forward_length, -1):
            form, of = self._made.forms[self._rows[step]]
            if form != "unpack" or packings[of].unpack_seconds:
                continue
            value = self._graph.ops[self._rows[step]].outputs[0]
            steps = self._reads[value]
            place = steps.index(step)
            least = max(steps[place - 1] + 1, self._first_of_region(step))
            needed = (
                float(self._begin[steps[place + 1]]) if place + 1 < len(steps) else float(self._begin[step])
            )
            begun = min(begun, needed) - packings[of].fetch_seconds
            at, size = step, self._graph.values[value].bytes
            while at > least and self._begin[at] > begun and self._room[at - 1] >= size:
                at -= 1
            begun = max(begun, float(self._begin[at]))
            if at < step:
                self._room[at:step] -= size
                anchors[step] = at
        return anchors

    def _first_of_region(self, step: int) -> int:
        """The first step of the backward of a step's region that fetches may be placed before."""
        region = self._graph.ops[self._rows[step]].region
        first = step
        while first > self._graph.forward_length and self._graph.ops[self._rows[first - 1]].region == region:
            first -= 1
        return first
