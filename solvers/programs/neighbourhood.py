"""Large neighbourhood search: solve the re-runs of one part of the forward anew; all others stay.

Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998
(doi 10.1007/3-540-49481-2_30); the program of a part is that of :mod:`solvers.programs.exact_ilp`.

A *part* is a stretch of the forward operations of one captured graph; where a model is several graphs, as its
layers may be, a part is a whole graph if that is short. The re-runs of a part may move, come and go, and be
made several times, wherever one of its results is read. The bytes of the rest of the step are given, and
steps that neither read nor write a value of the part are one slot. The search goes through the parts from the
last to the first until none gets better, and tries the re-runs of a layer for all layers like it.

Not optimal: no part saves bytes for another one.
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
"""Most forward operations of a part where parts are layers: its program has a variable for each of them, at
every place in the backward where one of its results is read."""
STRETCHES = (15, 30)
"""The same for parts of a single graph, whose results are read in more places; small parts come first."""
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

    Unless the time limit ends it, the answer depends on no clock: ranks that plan by themselves must come to
    the same answer.

    Args:
        search: Has the schedule, and gets better ones.
        work: No other part is begun after so much work of all programs together, see
            :class:`solvers.programs.slots.ChosenRuns`.
        nodes: Most nodes of the tree of each program.
        enough: Seconds at which the schedule is fast enough.
        stretches: Most forward operations of a part where parts are no layers; tried in this order.
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
    """Solve the re-runs of a part of the fastest schedule anew; returns how much work it was."""
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
    """Give the re-runs of a layer to the layers like it, where that is faster: to all of them, or else to one
    after the other."""
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
            places = backward[graph.ops[other[0]].region]
            schedule = _with_runs(graph, schedule, other, [(places[at], other[n]) for at, n in runs])
        search.try_schedule(prune(graph, schedule))
        if group is others and search.fastest.seconds < before:
            return


def _reruns(graph: Graph, schedule: Schedule, part: Sequence[BaseOp]) -> Iterator[tuple[BaseOp, BaseOp]]:
    """The re-runs of a part in a schedule, in order, and the base operation that each comes before."""
    for reruns, at in _between_base_ops(is_rerun(graph, schedule)):
        for i in listed(BaseOp, graph.base_of[schedule[reruns]]):
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
    """A key that layers with the same operations and values share.

    None for a part that is less than a layer, and for layers with values that constraints keep or recompute.
    """
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
        """Whether re-runs may come before a base operation: before the first of the region, where results are
        read, and where the schedule has some."""
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
            self.slots.append(slot_of(self.graph, again, optional=True, other_bytes=int(self.between[n])))
            self.start.append(i in used)

    def runs(self, n: Step) -> None:
        """A step that runs in any case."""
        row = RowId(int(self.schedule[n]))
        slot = slot_of(self.graph, row, other_bytes=int(self.during[n]))
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
            most = max(int(self.during[n] + workspace[r]) for n, r in zip(self._merged, rows, strict=True))
            self.slots.append(Slot(rows[-1], False, (), (), most, rows))
            self.start.append(True)
            self._merged = []
