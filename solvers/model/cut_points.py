"""Where a forward pass can be cut, and the values to keep to restart it there.

*Position* p is the place right before forward operation p. A value *crosses* p if it is computed before p,
and re-running an operation at or after p, of the same region, reads it. Who keeps the values that cross p can
re-run the region from p on. If one value alone connects what is before p with what is after it, that value is
an articulation point. Few graphs have many; any graph has positions that few bytes cross.

*Pinned* values are kept by all solvers that cut, and count as crossing nothing. These are values that
no operation can recompute, very small values, and small values that many operations read (attention masks,
position biases, normalisation statistics): without them more positions are cheap to cut.
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
"""The smallest values are pinned that together take at most this fraction of the forward's bytes."""

SHARED_FRACTION = 2e-2
"""A value of at most this fraction of the forward's bytes is pinned if it is widely read, see below."""

WIDELY_READ = 8
"""A value is widely read if so many forward operations read it, over more than half of the forward."""


@dataclass(frozen=True)
class ForwardUses:
    """Where values are read, by re-runs of the forward and by the backward.

    The index of an operation is its place in the captured step, forward and backward; int64. Where no
    operation reads the value, it is that of the value's producer, which is -1 for a value that is an input.

    Attributes:
        last_rerun: The last forward operation of the value's region whose re-run reads it.
        first_backward: The first backward operation of the value's region that reads it; -1 where none does.
        last_backward: The last such operation; -1 where none does.
        last_any: The last operation of any region, forward or backward, that reads it.
        rerun_count: How many forward operations of its region read it when they run again.
    """

    last_rerun: BaseOpPerValue
    first_backward: BaseOpPerValue
    last_backward: BaseOpPerValue
    last_any: BaseOpPerValue
    rerun_count: PerValue


def forward_uses(graph: Graph) -> ForwardUses:
    """The uses of all values; found once for a graph."""
    if "forward_uses" not in graph.analyses:
        graph.analyses["forward_uses"] = _forward_uses(graph)
    uses: ForwardUses = graph.analyses["forward_uses"]
    return uses


def _forward_uses(graph: Graph) -> ForwardUses:
    # Lists: Python reads and writes single elements of arrays many times slower.
    table, forward_length = graph.walk_table, graph.forward_length
    producer = graph.producer.tolist()
    last_rerun, last_any = list(producer), list(producer)
    first_backward, last_backward = [-1] * len(producer), [-1] * len(producer)
    rerun_count = [0] * len(producer)
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
                    last_rerun[v] = max(last_rerun[v], i)
                    rerun_count[v] += 1
    uses = last_rerun, first_backward, last_backward, last_any, rerun_count
    return ForwardUses(*(np.array(of_values, dtype=np.int64) for of_values in uses))


def last_forward_use(graph: Graph) -> BaseOpPerValue:
    """For each value the last forward operation that reads it in its first run; its producer where none does.

    Found once for a graph.
    """
    if "last_forward_use" not in graph.analyses:
        last, inputs = graph.producer.tolist(), graph.walk_table.inputs
        for i in graph.forward_ops:
            for v in inputs[i]:
                last[v] = i
        graph.analyses["last_forward_use"] = np.array(last, dtype=np.int64)
    found: BaseOpPerValue = graph.analyses["last_forward_use"]
    return found


def pinned_values(graph: Graph, uses: ForwardUses) -> ValueMask:
    """Which values are pinned."""
    forward = (graph.producer >= 0) & (graph.producer < graph.forward_length)
    total = max(1, int(graph.bytes[forward].sum()))
    pinned = graph.recompute_row < 0
    sizes = np.sort(graph.bytes[forward])
    together = np.cumsum(sizes)
    for size in np.unique(sizes):  # values of one size are pinned all or none
        if together[np.searchsorted(sizes, size, side="right") - 1] > SMALL_FRACTION * total:
            break
        pinned |= forward & (graph.bytes <= size)
    widely_read = uses.rerun_count >= WIDELY_READ
    widely_read &= uses.last_rerun - graph.producer > graph.forward_length // 2
    pinned |= forward & widely_read & (graph.bytes <= SHARED_FRACTION * total)
    return pinned


@dataclass(frozen=True)
class Cuts:
    """The ``graph.forward_length + 1`` positions of the forward, and the values that cross them.

    Attributes:
        bytes: Bytes of the values that cross each position.
        count: How many values cross each position.
        articulation: For each position whether the operation before it produces an articulation point.
        start: For each value its producer; the value crosses the positions after this, up to ``end``. -1 for
            values that are pinned, and those that the forward does not compute.
        end: For each value the last position that it crosses; its start where it crosses none.
        sizes: Bytes of each value.
    """

    bytes: PerPosition
    count: PerPosition
    articulation: PositionMask
    start: BaseOpPerValue
    end: BaseOpPerValue
    sizes: PerValue

    def crossing(self, position: Position) -> ValueIds:
        """The values that cross a position, ascending."""
        return np.flatnonzero((self.start >= 0) & (self.start < position) & (position <= self.end))

    @cached_property
    def _by_start(self) -> tuple[BaseOpPerValue, BaseOpPerValue, PerValue]:
        """``start``, ``end`` and ``sizes``, sorted by ``start``."""
        order = np.argsort(self.start, kind="stable")
        return self.start[order], self.end[order], self.sizes[order]

    def new_bytes(self, earlier: Position, position: Position) -> float:
        """Bytes of the values that cross ``position`` and are computed between ``earlier`` and it."""
        start, end, sizes = self._by_start
        window = slice(*np.searchsorted(start, (earlier, position)).tolist())
        return float(sizes[window][end[window] >= position].sum())

    def kept_at(self, positions: Iterable[Position]) -> ValueMask:
        """Which values cross at least one of the positions."""
        cuts = np.array(sorted(positions), dtype=np.int64)
        first = np.searchsorted(cuts, self.start, side="right")
        last = np.searchsorted(cuts, self.end, side="right")
        return (self.start >= 0) & (first < last)


def find_cuts(graph: Graph, uses: ForwardUses, pinned: ValueMask) -> Cuts:
    """The positions of a graph's forward; found once for the same pinned values."""
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
    end = np.where(forward, uses.last_rerun, -1)
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
    """The values each of which alone connects the operations before it with those after it.

    These are articulation points of the undirected graph that connects forward operations with the values
    that they read and write when they run again. Chen et al. 2016 cut there.
    """
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
        if v < offset and any(n - offset > producer[v] for n in flow.neighbors(v))  # an operation after it
    )
