"""Blocks in a row, recomputed as often as it pays: the persistent dynamic program of rotor
(Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains",
2019, arXiv 1911.13214) over blocks with several options each, as Rockmate (Zhao et al., ICML 2023).

Elsewhere: revolve, Gruslys et al. 2016 (memory-efficient backpropagation through time).

The forward phase is cut into blocks (see ``blocks``). T[s, t, m] is the least time to do the
backward of blocks t down to s when what crosses into s is held and m bytes are left:

    keep a cut s' after s:       seconds(s .. s'-1) + T[s', t, m - boundary(s, s')] + T[s, s'-1, m]
    keep an option o of block s: seconds(s) + reruns(s, o) + T[s+1, t, m - boundary(s, s+1) - bytes(s, o)]
                                 if the backward of s under o fits in m
    s = t:                       just in time, nothing kept, if that fits in m

One table answers all budgets. A schedule is read off it and made by the just-in-time walk, which
forgets what the table does not keep; its simulated peak decides which m a budget is worth.

Not optimal: the blocks' options come from a few prices, peaks are those of blocks evaluated together,
memory is counted in slots, and what is kept stays until its backward (persistence).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from solvers.chains.blocks import Blocks, find_blocks
from solvers.local.polish import polish
from solvers.model.arrays import BlockIds, Integers, Numbers, PerPosition, Positions, ValueMask
from solvers.model.cut_points import Cuts, find_cuts, forward_uses, pinned_values
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import Block, Position, RowId, ValueId, listed
from solvers.model.just_in_time import Forget
from solvers.model.solver import solver
from solvers.sqrt_n import families, one_extra_forward, segment_walls, weights

NAME = "chain"
SLOTS = 400
"""The number of slots that the memory is cut into."""
SCANNED_FACTOR = 1.3
"""Tables are scanned for memory up to this factor of the budget: simulated peaks may be lower."""
SCANNED_SLOTS = 30
"""About the number of amounts of memory that are tried for each table that is scanned."""
LEAST_PEAK_TRIALS = 16
"""The number of plans of each table that are judged for the least peak, those of least memory first."""
LEAST_PEAK_SLOWER = 1.02
"""The factor by which such a plan may be slower than allowed, as the table overrates seconds."""
COUNTS = (64, 48, 32, 24, 10)
"""Numbers of blocks tried: the table grows with the cube of their number."""
TOGETHER = 60_000
"""About the number of entries of a table that are computed together: as many as a cache holds."""


@solver(NAME)
def solve(search: Search) -> None:
    """Solve by dynamic programming over blocks; the least peak is that at no more than one extra forward."""
    everything = search.try_everything()
    if search.is_settled(everything):
        return
    if search.budget is None:
        search.most_seconds = search.graph.base_seconds + one_extra_forward(search.graph)
    improve(search, search.budget, everything.peak_bytes)


@dataclass
class Tables:
    """Blocks and tables of one graph, which other budgets use again."""

    blocks: dict[tuple[Position, ...], Blocks] = field(default_factory=dict)
    filled: dict[tuple[tuple[Position, ...], int], "Table"] = field(default_factory=dict)


def improve(
    search: Search,
    budget: int | None,
    everything: int,
    tables: Tables | None = None,
    *,
    counts: Sequence[int] = COUNTS,
    kinds: int = 2,
) -> None:
    """Offer ``search`` the schedules of the tables for several numbers of blocks, cut at so many kinds of
    positions."""
    tables = tables or Tables()
    graph = search.graph
    uses = forward_uses(graph)
    pinned = pinned_values(graph, uses)
    cuts = find_cuts(graph, uses, pinned)
    needed = (uses.last_backward >= 0) & ~pinned
    tried: set[tuple[Position, ...]] = set()
    for n, count in enumerate(counts):
        for positions in families(cuts)[:kinds]:
            if search.out_of_time():
                return
            walls = choose_walls(weights(graph, needed), positions, count)
            if not walls or tuple(walls) in tried:
                continue
            tried.add(tuple(walls))
            key, most = tuple(walls), table_bytes(budget, everything)
            blocks = tables.blocks.get(key) or find_blocks(
                graph, uses, cuts, pinned, search.constraints, walls, stop=search.out_of_time
            )
            if search.out_of_time():
                return
            tables.blocks[key] = blocks
            if (key, most) not in tables.filled:
                tables.filled[key, most] = fill(blocks, most)
            best = read_off(search, blocks, cuts, pinned, tables.filled[key, most], budget)
            if budget is not None and best is not None and not search.out_of_time():
                polish(search, best, budget)
        search.tell("chains", (n + 1) / len(counts))
    dear = graph.base_seconds + one_extra_forward(graph)
    if budget is not None and (search.fastest is None or search.fastest.seconds > dear):
        scan(search, cuts, pinned, tables, budget, everything)


def scan(search: Search, cuts: Cuts, pinned: ValueMask, tables: Tables, budget: int, everything: int) -> None:
    """Judge many schedules near the least peak, of tables without a limit of memory, and polish the best.

    There, schedules of about the same memory in the table differ in their simulated peaks.
    """
    for key, blocks in tables.blocks.items():
        if search.out_of_time():
            return
        if (key, everything) not in tables.filled:
            tables.filled[key, everything] = fill(blocks, everything)
        table = tables.filled[key, everything]
        most = min(len(table.seconds[0, -1]) - 1, int(SCANNED_FACTOR * budget / table.slot))
        distinct = distinct_slots(table.seconds[0, -1][: most + 1])
        for slots in distinct[:: max(1, len(distinct) // SCANNED_SLOTS)].tolist():
            retained = plan(blocks, cuts, table, slots)
            if retained is not None and not search.out_of_time():
                judge(search, blocks, cuts, pinned, retained)
    if search.fastest is not None:
        polish(search, search.fastest, budget)


def table_bytes(budget: int | None, everything: int) -> int:
    """The memory that a table covers: in steps of a quarter of an octave, so that close budgets have
    the same table and the least peak reported for one is found again for another."""
    if budget is None:
        return everything + everything // 4
    steps = np.floor(4 * np.log2(max(1.0, everything / max(1.0, 1.25 * budget))))
    return int(1.25 * everything * 2.0 ** (-steps / 4)) + 1


def choose_walls(weight: PerPosition, positions: Positions, count: int) -> list[Position]:
    """At most ``count - 1`` of the positions, so that the blocks' bytes are balanced."""
    low, high = 0.0, float(weight[-1])
    if len(positions) < count:
        return listed(Position, positions)
    for _ in range(30):
        size = (low + high) / 2
        if len(segment_walls(positions, weight, size)) < count:
            high = size
        else:
            low = size
    return segment_walls(positions, weight, high)


@dataclass(frozen=True)
class Table:
    """The dynamic program of some blocks: ``seconds[s, t, m]`` for blocks s to t with m slots of memory, of
    ``slot`` bytes each."""

    blocks: Blocks
    seconds: Numbers
    slot: float

    def choice(self, s: Block, t: Block, m: int) -> int:
        """The choice that gives ``seconds[s, t, m]``: below the number of blocks a cut s' > s; at or
        above it, the option to keep; -1 is just in time."""
        blocks, n = self.blocks, self.blocks.count
        peak = np.ceil(blocks.option_peak[:, s] / self.slot)
        value = blocks.forward_seconds[s] + blocks.option_seconds[:, s]
        if s == t:
            value = np.concatenate(([blocks.option_seconds[0, s]], value))
            value[m < np.concatenate((peak[:1], peak))] = np.inf
            return -1 if not value.argmin() else n + int(value.argmin()) - 1
        taken = np.rint(blocks.option_bytes[:, s] / self.slot).astype(np.int64)
        left = m - taken - int(np.rint(blocks.boundary[s, s + 1] / self.slot))
        value += self.seconds[s + 1, t, np.maximum(left, 0)]
        value[(left < 0) | (m < peak)] = np.inf
        cuts = np.arange(s + 1, t + 1)
        left = m - np.rint(blocks.boundary[s, cuts] / self.slot).astype(np.int64)
        total = np.concatenate(([0.0], np.cumsum(blocks.forward_seconds)))
        split = self.seconds[cuts, t, np.maximum(left, 0)] + self.seconds[s, s:t, m]
        split += total[cuts] - total[s]
        split[(left < 0) | (m < least_slots(blocks, np.array([s]), t - s, self.slot)[0])] = np.inf
        if split.min() < value.min():
            return int(cuts[split.argmin()])
        return n + int(value.argmin())


def least_slots(blocks: Blocks, first: BlockIds, length: int, slot: float) -> Integers:
    """The slots that it takes to run from each ``first`` block to each of the ``length`` cuts after it."""
    run = first[:, None] + np.arange(length)
    running = np.maximum.accumulate(blocks.forward_bytes[run] + blocks.boundary[first[:, None], run], axis=1)
    least: Integers = ((running + blocks.start_bytes[first + length, None]) / slot).astype(np.int64)
    return least


def fill(blocks: Blocks, most: int, slots: int = SLOTS) -> Table:
    """Fill the table for up to ``most`` bytes, all stretches of a length together."""
    n, wide = blocks.count, slots + 1
    slot = max(1.0, most / slots)
    every = np.arange(wide)
    # Row [t, s] of ``padded`` is T[s, t, .] after as many infinite entries: a slice of it is a shift.
    padded = np.full((n, n, 2 * wide), np.inf)
    flat = padded.reshape(-1)
    seconds = np.full((n, n, wide), np.inf)
    total = np.concatenate(([0.0], np.cumsum(blocks.forward_seconds)))
    taken = np.rint(blocks.option_bytes / slot).astype(np.int64)
    peak = np.ceil(blocks.option_peak / slot).astype(np.int64)
    boundary = np.minimum(np.rint(blocks.boundary / slot).astype(np.int64), wide)
    cost = blocks.forward_seconds + blocks.option_seconds
    for length in range(n):
        together = max(1, TOGETHER // (wide * max(1, length)))
        for begin in range(0, n - length, together):
            s = np.arange(begin, min(begin + together, n - length))
            t = s + length
            value = np.repeat(cost[:, s, None], wide, axis=2)
            if length:
                shift = np.minimum(wide, boundary[s, s + 1] + taken[:, s])
                value += flat.take((((t * n + s + 1) * 2 + 1) * wide - shift)[..., None] + every)
            value[every < peak[:, s, None]] = np.inf
            best = value.min(axis=0)
            if length:
                cut = s[:, None] + np.arange(1, length + 1)
                shift = ((t[:, None] * n + cut) * 2 + 1) * wide - boundary[s[:, None], cut]
                value = flat.take(shift[..., None] + every)
                value += seconds[s[:, None], cut - 1]
                value += (total[cut] - total[s, None])[..., None]
                np.putmask(value, every < least_slots(blocks, s, length, slot)[..., None], np.inf)
                np.minimum(best, value.min(axis=1), out=best)
            else:
                enough = every >= peak[0, s, None]
                np.minimum(best, np.where(enough, blocks.option_seconds[0, s, None], np.inf), out=best)
            padded[t, s, wide:] = seconds[s, t] = best
    return Table(blocks, seconds, slot)


@dataclass(frozen=True)
class Retained:
    """The values that a plan keeps: ``at[s, t]``, those to retain when a stretch from block s reaches t."""

    at: dict[tuple[Block, Block], set[ValueId]]


def plan(blocks: Blocks, cuts: Cuts, table: Table, slots: int) -> Retained | None:
    """Follow the choices from the whole chain with ``slots`` of memory; None if that is too little."""
    n = blocks.count
    if not np.isfinite(table.seconds[0, n - 1, slots]):
        return None
    at: dict[tuple[Block, Block], set[ValueId]] = {}
    crossing = [set(listed(ValueId, cuts.crossing(w))) for w in blocks.walls]
    members = [np.flatnonzero(blocks.of_value == b) for b in range(n)]
    pending = [(Block(0), Block(n - 1), slots)]
    while pending:
        s, t, m = pending.pop()
        first, kept = s, set[ValueId]()
        while True:
            c = table.choice(s, t, m)
            if c == -1:
                break
            if c >= n:
                kept |= set(listed(ValueId, members[s][blocks.options[c - n][members[s]]]))
                if s == t:
                    break
                m -= int(np.rint(blocks.option_bytes[c - n, s] / table.slot))
                m -= int(np.rint(blocks.boundary[s, s + 1] / table.slot))
                kept |= crossing[s]
                s = Block(s + 1)
            else:
                pending.append((s, Block(c - 1), m))
                m -= int(np.rint(blocks.boundary[s, c] / table.slot))
                kept |= crossing[c - 1]
                s = Block(c)
        at[first, t] = kept
    return Retained(at)


def judge(search: Search, blocks: Blocks, cuts: Cuts, pinned: ValueMask, retained: Retained) -> Candidate:
    """Make and judge the schedule of a plan."""
    kept = pinned.copy()
    kept[list(retained.at[Block(0), Block(blocks.count - 1)])] = True
    return search.try_kept(kept, forgetting(search.graph, blocks, cuts, retained))


def forgetting(graph: Graph, blocks: Blocks, cuts: Cuts, retained: Retained) -> Forget:
    """Forget of a stretch what the plan does not retain, the last block of it left alone."""
    of_value = listed(Block, blocks.of_value)
    outputs = graph.walk_table.outputs
    crossing = [set(listed(ValueId, cuts.crossing(w))) for w in blocks.walls]

    def forget(stretch: list[RowId]) -> list[ValueId]:
        first = of_value[outputs[stretch[0]][0]]
        last = of_value[outputs[stretch[-1]][0]]
        if first == last:
            return []
        keep = retained.at.get((first, last))
        if keep is None:
            keep = crossing[last - 1]
        return [v for row in stretch for v in outputs[row] if of_value[v] < last and v not in keep]

    return forget


def distinct_slots(seconds: Numbers) -> Integers:
    """The slots with which less time is possible than with one fewer."""
    fine = np.flatnonzero(np.isfinite(seconds))
    return fine[np.diff(seconds[fine], prepend=np.inf) < 0]


def read_off(
    search: Search, blocks: Blocks, cuts: Cuts, pinned: ValueMask, table: Table, budget: int | None
) -> Candidate | None:
    """Find the memory in the table whose schedule, simulated, makes the most of the budget."""
    whole = table.seconds[0, -1]
    distinct = distinct_slots(whole)
    if budget is None and len(distinct):
        more = whole[distinct] - whole[distinct[-1]]
        distinct = distinct[search.graph.base_seconds + more <= LEAST_PEAK_SLOWER * search.most_seconds]
    best: Candidate | None = None
    low, high = 0, len(distinct) - 1
    tried: set[int] = set()
    while low <= high and not search.out_of_time():
        middle = (low + high) // 2 if budget is not None else low
        tried.add(middle)
        retained = plan(blocks, cuts, table, int(distinct[middle]))
        assert retained is not None
        candidate = judge(search, blocks, cuts, pinned, retained)
        if budget is None:
            if len(tried) == LEAST_PEAK_TRIALS:
                break
            low += 1
            continue
        if candidate.peak_bytes <= budget:
            if best is None or candidate.seconds < best.seconds:
                best = candidate
            low = middle + 1
        else:
            high = middle - 1
    return best
