"""Large neighbourhood search: the re-runs of a part of the forward are found anew, all others stay.

Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998
(doi 10.1007/3-540-49481-2_30); the program of a part is that of :mod:`solvers.programs.exact_ilp`.

A *part* is a stretch of the forward operations of one captured graph: where there are several graphs, as for
the layers of a model, all of them if they are few. Its re-runs may move, come and go, and be made several
times, where anything of its results is read; what the rest of the step holds meanwhile is given, and steps
that neither read nor write a value of the part are one slot. Parts are gone through from the last to the
first until none gets better; what is found for a layer is tried for all layers like it.

Not optimal: bytes that one part could save for another are of no use to it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from solvers.local.polish import is_rerun, prune
from solvers.model.arrays import PerStep, Schedule, StepMask
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.indices import BaseOp, Per, Region, RowId, SlotId, Step, ValueId, listed
from solvers.model.schedule import lifetimes
from solvers.programs.slots import Slot, best_runs, slot_of

LAYER = 60
"""Forward operations of a part at most where parts are layers: its program has a variable for each, at every
place in the backward where one of its results is read."""
STRETCHES = (15, 30)
"""Of a part of one graph, where results are read in more places; first the small parts, then larger ones."""
GAP = 1e-4
"""Relative gap of a part's re-runs at which its program counts as solved."""


def improve(
    search: Search,
    *,
    work: int,
    nodes: int,
    enough: float = 0.0,
    stretches: Sequence[int] = STRETCHES,
) -> None:
    """Improve the fastest schedule that fits.

    Unless the time limit comes in between, the answer depends on no clock: ranks of a cluster that plan each
    by itself must come to the same.

    Args:
        search: Has the schedule, and gets better ones.
        work: How much the programs of all parts may take together, see :class:`solvers.programs.slots.Runs`;
            no other part is begun then.
        nodes: Of the tree of each program, at most.
        enough: Seconds at which the schedule is fast enough.
        stretches: How many forward operations a part has at most where parts are no layers.
    """
    for most in (LAYER,) if has_layers(search.graph) else stretches:
        work -= _improve_parts(search, find_parts(search.graph, most), work, nodes, enough)


def has_layers(graph: Graph) -> bool:
    """Whether a graph is made of several captured graphs, none of which is longer than a layer."""
    lengths = Counter(graph.ops[i].region for i in _recomputable(graph))
    return len(lengths) > 1 and max(lengths.values()) <= LAYER


def _improve_parts(
    search: Search, parts: Sequence[Sequence[BaseOp]], work: int, nodes: int, enough: float
) -> int:
    """Returns how much work it was."""
    used, settled, signatures = 0, set[int](), list[object | None]()
    while search.fastest is not None and len(settled) < len(parts):
        for n, part in reversed(list(enumerate(parts))):
            if n in settled or used >= work or search.fastest.seconds <= enough or search.out_of_time():
                return used
            before = search.fastest.seconds
            used += improve_part(search, part, nodes=nodes)
            if search.fastest.seconds < before:
                settled.clear()
                signatures = signatures or [_signature(search, each) for each in parts]
                if like := _like(n, signatures):
                    _copy(search, part, [parts[m] for m in like])
            settled.add(n)
    return used


def find_parts(graph: Graph, most: int = LAYER) -> list[list[BaseOp]]:
    """The forward operations that may run again, in parts of so many at most."""
    by_region: dict[Region, list[BaseOp]] = {}
    for i in _recomputable(graph):
        by_region.setdefault(graph.ops[i].region, []).append(i)
    parts = []
    for ops in by_region.values():
        count = -(-len(ops) // most)
        cuts = [round(n * len(ops) / count) for n in range(count + 1)]
        parts += [ops[a:b] for a, b in pairwise(cuts)]
    return parts


def _recomputable(graph: Graph) -> list[BaseOp]:
    return [i for i in graph.forward_ops if any(graph.recompute_row[v] >= 0 for v in graph.ops[i].outputs)]


def improve_part(search: Search, part: Sequence[BaseOp], *, nodes: int) -> int:
    """Find the re-runs of a part of the fastest schedule anew; returns how much work it was."""
    assert search.fastest is not None
    assert search.budget is not None
    graph = search.graph
    slots, start = find_slots(graph, search.fastest.schedule, part)
    if not any(used and slot.optional for slot, used in zip(slots, start, strict=True)):
        return 0  # nothing of it runs again
    found = best_runs(
        graph,
        slots,
        search.budget,
        search.constraints,
        values=sorted(_values_of(graph, part)),
        seconds=search.seconds_left,
        nodes=nodes,
        gap=GAP,
        start=start,
    )
    if found.schedule is not None:
        search.try_schedule(prune(graph, found.schedule))
    return found.work


def _like(n: int, signatures: Sequence[object | None]) -> list[int]:
    """The others that have the signature of one."""
    own = signatures[n]
    return [] if own is None else [m for m, other in enumerate(signatures) if m != n and other == own]


def _copy(search: Search, part: Sequence[BaseOp], others: Sequence[Sequence[BaseOp]]) -> None:
    """Run again in other layers that are like this one what is run again in it, where that is faster: in all
    of them, or else in one after the other."""
    assert search.fastest is not None
    graph, before = search.graph, search.fastest.seconds
    backward: dict[Region, list[BaseOp]] = {}
    for t in graph.backward_ops:
        backward.setdefault(graph.ops[t].region, []).append(t)
    own = {i: n for n, i in enumerate(part)}
    place = {t: n for n, t in enumerate(backward[graph.ops[part[0]].region])}
    runs = [(place[at], own[i]) for i, at in _reruns(graph, search.fastest.schedule, part)]
    one_by_one = [[other] for other in others] if len(others) > 1 else []
    for group in (others, *one_by_one):
        schedule = search.fastest.schedule
        for other in group:
            there = backward[graph.ops[other[0]].region]
            schedule = _with_runs(graph, schedule, other, [(there[at], other[n]) for at, n in runs])
        search.try_schedule(prune(graph, schedule))
        if group is others and search.fastest.seconds < before:
            return


def _reruns(graph: Graph, schedule: Schedule, part: Sequence[BaseOp]) -> Iterator[tuple[BaseOp, BaseOp]]:
    """The re-runs of a part in a schedule, in order, and before which base operation each is."""
    for again, at in _between_base_ops(is_rerun(graph, schedule)):
        for i in listed(BaseOp, graph.base_of[schedule[again]]):
            if i in part:
                yield i, BaseOp(RowId(int(schedule[at])))


def _with_runs(
    graph: Graph, schedule: Schedule, part: Sequence[BaseOp], runs: Sequence[tuple[BaseOp, BaseOp]]
) -> Schedule:
    """A schedule with other re-runs of a part: before which base operation each is, in order, and of what."""
    others = schedule[~(is_rerun(graph, schedule) & np.isin(graph.base_of[schedule], part))]
    step = {row: n for n, row in enumerate(others.tolist())} if runs else {}
    rows = np.array([graph.rerun(i) for _, i in runs], dtype=np.int64)
    result: Schedule = np.insert(others, [step[at] for at, _ in runs], rows)
    return result


def _signature(search: Search, part: Sequence[BaseOp]) -> object | None:
    """What layers that can be run alike have in common; None for what is not all of a layer, and for layers
    of which something is to be kept, or to be run again, in any case."""
    graph, region = search.graph, search.graph.ops[part[0]].region
    values = [v for i in part for v in graph.ops[i].outputs if graph.recompute_row[v] >= 0]
    if not search.constraints.free(graph)[values].all():
        return None
    if sum(graph.ops[i].region == region for i in _recomputable(graph)) != len(part):
        return None

    def told(i: BaseOp) -> tuple[float, int, tuple[int, ...]]:
        return (
            graph.ops[i].seconds,
            len(graph.ops[i].inputs),
            tuple(graph.values[v].bytes for v in graph.ops[i].outputs),
        )

    return [told(i) for i in part], [told(t) for t in graph.backward_ops if graph.ops[t].region == region]


def find_slots(
    graph: Graph, schedule: Schedule, part: Sequence[BaseOp]
) -> tuple[Per[SlotId, Slot], Sequence[bool]]:
    """The slots of a part of the forward, with those of its re-runs optional, and all other steps.

    Returns:
        The slots in order, and for each whether the schedule uses it.
    """
    steps = _Steps(graph, schedule, part)
    for before, at in _between_base_ops(steps.again):
        row = RowId(int(schedule[at]))
        others = [n for n in before if steps.base[n] not in steps.part]
        used = {steps.base[n] for n in before} & steps.part
        if row >= graph.forward_length and steps.is_place(BaseOp(row), [*others, at], bool(used)):
            waiting = [i for i in part if graph.ops[i].region == graph.ops[row].region]
            for n in [*others, at]:
                sooner = [i for i in waiting if n == at or i < steps.base[n]]
                steps.may_run(sooner, used, n)
                waiting = waiting[len(sooner) :]
                steps.runs(n)
        else:
            for n in [*others, at]:
                steps.runs(n)
    steps.close()
    return steps.slots, steps.start


def _values_of(graph: Graph, part: Sequence[BaseOp]) -> set[ValueId]:
    table = graph.walk_table
    rows = [graph.rerun(i) for i in part]
    return {v for r in rows for v in (*table.inputs[r], *table.outputs[r]) if graph.producer[v] >= 0}


def _between_base_ops(again: StepMask) -> Iterator[tuple[list[Step], Step]]:
    """Each base operation's step, and the re-runs between it and the one before."""
    waiting: list[Step] = []
    for n in listed(Step, np.arange(len(again))):
        if again[n]:
            waiting.append(n)
        else:
            yield waiting, n
            waiting = []


@dataclass
class _Steps:
    """The steps of a schedule, as they become slots."""

    graph: Graph
    schedule: Schedule
    ops: Sequence[BaseOp]
    slots: list[Slot] = field(default_factory=list)
    start: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph, schedule = self.graph, self.schedule
        self.part = set(self.ops)
        self.again = is_rerun(graph, schedule)
        self.base = listed(BaseOp, graph.base_of[schedule])
        self.values = _values_of(graph, self.ops)
        self.results = {v for i in self.ops for v in graph.ops[graph.rerun(i)].outputs}
        self.held = {until for v in self.values if (until := graph.values[v].held_until) is not None}
        self.during, self.between = self._beside()
        self._merged: list[Step] = []
        self._seen: set[Region] = set()

    def _beside(self) -> tuple[PerStep, PerStep]:
        """Bytes that other values hold during each step, and right before it."""
        graph, length = self.graph, len(self.schedule)
        lives = lifetimes(graph, self.schedule)
        others = ~np.isin(lives.value, np.fromiter(self.values, dtype=np.int64, count=len(self.values)))
        others &= ~graph.on_demand[lives.value] | lives.used
        size, first, last = graph.bytes[lives.value[others]], lives.start[others], lives.end[others] + 1
        changes = []
        for begin in (first, np.minimum(first + 1, last)):
            change = np.zeros(length + 1, dtype=np.int64)
            np.add.at(change, begin, size)
            np.subtract.at(change, last, size)
            changes.append(np.cumsum(change)[:length])
        return changes[0], changes[1]

    def is_place(self, op: BaseOp, steps: Sequence[Step], used: bool) -> bool:
        """Whether re-runs before a base operation are looked for: at the first of the region, where results
        are read, and where the schedule has some."""
        region = self.graph.ops[op].region
        first = region not in self._seen
        self._seen.add(region)
        inputs = self.graph.walk_table.inputs
        return (
            used
            or first
            or any(v in self.results for n in steps for v in inputs[RowId(int(self.schedule[n]))])
        )

    def may_run(self, ops: Sequence[BaseOp], used: set[BaseOp], n: Step) -> None:
        """Operations of the part may run again before a step."""
        if ops:
            self.close()
        for i in ops:
            again = self.graph.rerun(i)
            self.slots.append(slot_of(self.graph, again, optional=True, beside=int(self.between[n])))
            self.start.append(i in used)

    def runs(self, n: Step) -> None:
        """A step that is no question."""
        row = RowId(int(self.schedule[n]))
        slot = slot_of(self.graph, row, beside=int(self.during[n]))
        touches = not self.values.isdisjoint(slot.reads) or not self.values.isdisjoint(slot.writes)
        if touches or (not self.again[n] and row in self.held):
            self.close()
            self.slots.append(slot)
            self.start.append(True)
        else:
            self._merged.append(n)

    def close(self) -> None:
        """Make one slot of the steps that touch no value of the part."""
        if self._merged:
            rows = tuple(RowId(int(self.schedule[n])) for n in self._merged)
            workspace = self.graph.workspace_bytes
            beside = max(int(self.during[n] + workspace[r]) for n, r in zip(self._merged, rows, strict=True))
            self.slots.append(Slot(rows[-1], False, (), (), beside, rows))
            self.start.append(True)
            self._merged = []
