"""Where a forward pass can be cut, and the values to keep to restart it there.

A *position* p lies before forward operation p. The values that *cross* p are those computed before
it that a re-run of a later forward operation of the same region would read. Keeping them is all
that it takes to re-run the region from p on. Where a single value crosses, that value is an
articulation point; positions where few bytes cross generalise them to any graph.

*Pinned* values are always kept and cross nothing: values that nothing can recompute, values too small
to matter, and small values that very many operations share (attention masks, position biases,
normalisation statistics).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from solvers.model.arrays import BaseOpPerValue, PerPosition, PerValue, PositionMask, ValueIds, ValueMask
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, Position, ValueId, numbered

SMALL_FRACTION = 2.5e-3
"""The smallest values are pinned: as many as take together less than this fraction of the forward bytes."""

SHARED_FRACTION = 2e-2
"""A value below this fraction of the forward bytes, used all over the forward pass, is pinned."""


@dataclass(frozen=True)
class ForwardUses:
    """Where the values of the forward phase are read, by re-runs and by the backward phase.

    Attributes:
        last_forward: Last base operation whose re-run reads the value; its producer when none does.
        first_backward: First backward operation of its region that reads it; -1 when none does.
        last_backward: Last one; -1 when none does.
        last_any: Last base operation that reads it at all; its producer when none does.
        forward_count: Number of forward operations whose re-run reads it.
    """

    last_forward: BaseOpPerValue
    first_backward: BaseOpPerValue
    last_backward: BaseOpPerValue
    last_any: BaseOpPerValue
    forward_count: PerValue


def forward_uses(graph: Graph) -> ForwardUses:
    """Tabulate the uses of all values, once for a graph; arrays of int64 indexed by value."""
    if "forward_uses" not in graph.analyses:
        graph.analyses["forward_uses"] = _forward_uses(graph)
    uses: ForwardUses = graph.analyses["forward_uses"]
    return uses


def _forward_uses(graph: Graph) -> ForwardUses:
    # Lists, which are read and written one by one in a fraction of the time that arrays take.
    table, forward_length = graph.walk_table, graph.forward_length
    producer = graph.producer.tolist()
    last_forward, last_any = list(producer), list(producer)
    first_backward, last_backward = [-1] * len(producer), [-1] * len(producer)
    forward_count = [0] * len(producer)
    region = [table.region[max(i, 0)] for i in producer]
    for i, op in numbered(BaseOp, graph.ops[: graph.base_length]):
        own = op.region
        for v in table.inputs[i]:
            last_any[v] = i
            if i >= forward_length and own == region[v]:
                last_backward[v] = i
                if first_backward[v] < 0:
                    first_backward[v] = i
        if i < forward_length and op.recomputable:
            for v in table.inputs[graph.rerun(i)]:
                if own == region[v]:
                    last_forward[v] = max(last_forward[v], i)
                    forward_count[v] += 1
    uses = last_forward, first_backward, last_backward, last_any, forward_count
    return ForwardUses(*(np.array(of_values, dtype=np.int64) for of_values in uses))


def last_forward_use(graph: Graph) -> BaseOpPerValue:
    """For each value the last forward operation that reads it; its producer when none does. Computed once for
    a graph."""
    if "last_forward_use" not in graph.analyses:
        last, inputs = graph.producer.tolist(), graph.walk_table.inputs
        for i in graph.forward_ops:
            for v in inputs[i]:
                last[v] = i
        graph.analyses["last_forward_use"] = np.array(last, dtype=np.int64)
    found: BaseOpPerValue = graph.analyses["last_forward_use"]
    return found


def pinned_values(graph: Graph, uses: ForwardUses) -> ValueMask:
    """Which values are pinned, bool."""
    forward = (graph.producer >= 0) & (graph.producer < graph.forward_length)
    total = max(1, int(graph.bytes[forward].sum()))
    pinned = graph.recompute_row < 0
    sizes = np.sort(graph.bytes[forward])
    together = np.cumsum(sizes)
    for size in np.unique(sizes):
        if together[np.searchsorted(sizes, size, side="right") - 1] > SMALL_FRACTION * total:
            break
        pinned |= forward & (graph.bytes <= size)
    widely = (uses.forward_count >= 8) & (uses.last_forward - graph.producer > graph.forward_length // 2)
    pinned |= forward & widely & (graph.bytes <= SHARED_FRACTION * total)
    return pinned


@dataclass(frozen=True)
class Cuts:
    """All positions of the forward phase, ``graph.forward_length + 1`` of them.

    Attributes:
        bytes: Bytes that cross each position, pinned values left out, int64.
        count: How many values cross each position, int64.
        articulation: Positions behind an articulation point of the forward graph, bool.
        start: For each value its producer, or -1 for a value that crosses nothing.
        end: For each value the last position that it crosses.
        sizes: Bytes of every value.
    """

    bytes: PerPosition
    count: PerPosition
    articulation: PositionMask
    start: BaseOpPerValue
    end: BaseOpPerValue
    sizes: PerValue

    def crossing(self, position: Position) -> ValueIds:
        """The values that cross a position, sorted indices."""
        return np.flatnonzero((self.start >= 0) & (self.start < position) & (position <= self.end))

    @cached_property
    def _by_start(self) -> tuple[BaseOpPerValue, BaseOpPerValue, PerValue]:
        order = np.argsort(self.start, kind="stable")
        return self.start[order], self.end[order], self.sizes[order]

    def new_bytes(self, earlier: Position, position: Position) -> float:
        """Bytes that cross ``position`` and were computed at or behind the ``earlier`` one."""
        start, end, sizes = self._by_start
        window = slice(*np.searchsorted(start, (earlier, position)).tolist())
        return float(sizes[window][end[window] >= position].sum())

    def kept_at(self, positions: Iterable[Position]) -> ValueMask:
        """Which values cross at least one of the positions, bool."""
        walls = np.array(sorted(positions), dtype=np.int64)
        first = np.searchsorted(walls, self.start, side="right")
        last = np.searchsorted(walls, self.end, side="right")
        return (self.start >= 0) & (first < last)


def find_cuts(graph: Graph, uses: ForwardUses | None = None, pinned: ValueMask | None = None) -> Cuts:
    """Measure every position of the forward phase, once for a graph and pinned values."""
    uses = forward_uses(graph) if uses is None else uses
    pinned = pinned_values(graph, uses) if pinned is None else pinned
    known = graph.analyses.get("cuts")
    if known is not None and np.array_equal(known[0], pinned):
        cuts: Cuts = known[1]
        return cuts
    cuts = _find_cuts(graph, uses, pinned)
    graph.analyses["cuts"] = pinned.copy(), cuts
    return cuts


def _find_cuts(graph: Graph, uses: ForwardUses, pinned: ValueMask) -> Cuts:
    length = graph.forward_length
    forward = (graph.producer >= 0) & (graph.producer < length) & ~pinned
    start = np.where(forward, graph.producer, -1)
    end = np.where(forward, uses.last_forward, -1)
    crosses = np.flatnonzero(forward & (end > start))
    amount = np.zeros(length + 2, dtype=np.int64)
    number = np.zeros(length + 2, dtype=np.int64)
    for array, weight in ((amount, graph.bytes[crosses]), (number, np.ones(len(crosses), dtype=np.int64))):
        np.add.at(array, start[crosses] + 1, weight)
        np.subtract.at(array, end[crosses] + 1, weight)
    articulation = np.zeros(length + 1, dtype=bool)
    points = articulation_values(graph, pinned)
    articulation[graph.producer[points] + 1] = True
    return Cuts(
        np.cumsum(amount)[: length + 1],
        np.cumsum(number)[: length + 1],
        articulation,
        start,
        end,
        graph.bytes,
    )


def articulation_values(graph: Graph, pinned: ValueMask) -> list[ValueId]:
    """Values that alone connect the operations before them with those after (Chen et al. 2016 cut
    there): articulation points of the undirected graph of forward operations and values."""
    flow: nx.Graph[int] = nx.Graph()
    offset = len(graph.values)
    for i, op in numbered(BaseOp, graph.ops[: graph.forward_length]):
        if not op.recomputable:
            continue
        row = graph.rerun(i)
        for v in (*graph.walk_table.inputs[row], *graph.walk_table.outputs[row]):
            if not pinned[v]:
                flow.add_edge(offset + i, v)
    producer = graph.producer
    return sorted(
        v
        for v in nx.articulation_points(flow)
        if v < offset and any(n - offset > producer[v] for n in flow.neighbors(v))
    )
