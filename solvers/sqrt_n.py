"""Segments of about sqrt(n): Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016 (arXiv 1604.06174), section 4 and algorithm 3; the recursive form is section 4.4.

Elsewhere: segment checkpointing, ``checkpoint_sequential``, OpenAI's ``gradients_memory``.

The forward pass is cut into segments of balanced bytes. Values that cross a cut are kept, and the inside
of a segment is recomputed when its backward comes; the last segment is kept whole, since its backward
comes at once. The size of the segments is swept and every size simulated; so are segments that level
the peak (earlier ones are longer: when their backward comes, the later cuts are free). Cuts lie after
articulation points and, because many graphs have few or none (U-Net, DenseNet), also wherever few
bytes cross. Small values (statistics, reduced outputs) are always kept, and bytes that a budget leaves
over keep the values that save most seconds a byte.

Budgets below what one recomputation reaches are met by the recursive form: within a stretch that is
recomputed only some cuts are kept, and the rest is recomputed again, segment by segment, from
there. With k parts a level the memory grows as k log(n) and the time as n log(n). In small graphs
segments are also recomputed from their start for each of their parts, which holds least of all.

Not optimal: cuts are global and inside a segment all is recomputed or (by seconds a byte) nothing;
``ilp`` decides value by value, ``chain`` places recursive cuts by dynamic programming.
"""

import weakref
from bisect import bisect_left, bisect_right

import numpy as np

from solvers.model.arrays import Numbers, PerPosition, Positions, ValueMask
from solvers.model.constraints import Constraints
from solvers.model.cut_points import Cuts, ForwardUses, find_cuts, forward_uses, pinned_values
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import Position, RowId, Segment, ValueId, indices, listed
from solvers.model.just_in_time import Forget
from solvers.model.schedule import lifetimes
from solvers.model.solver import solver

NAME = "sqrt_n"
SIZES = 40
"""Segment sizes tried in each family of cuts."""
FROM_SCRATCH = 300
"""Most forward operations of a graph for which the schedule that recomputes everything for every backward
operation, quadratic in time, is tried, at budgets that nothing else reaches."""


@solver(NAME)
def solve(search: Search) -> None:
    """Place checkpoints at about sqrt(n) cuts; the least peak is that at no more than one extra forward."""
    if search.budget is None:
        search.most_seconds = search.graph.base_seconds + one_extra_forward(search.graph)
    everything = search.try_everything()
    if not search.fits(everything):
        improve(search)


def improve(search: Search) -> None:
    """Offer ``search`` the schedules of all forms that its budget asks for."""
    graph, budget = search.graph, search.budget
    if graph.forward_length < 2:
        return
    uses = forward_uses(graph)
    pinned = pinned_values(graph, uses)
    cuts = find_cuts(graph, uses, pinned)
    needed = (uses.last_backward >= 0) & ~pinned
    whole = search.stage_end
    search.stage_end = search.elapsed + search.seconds_left / 2
    single = single_level(search, cuts, pinned, needed, held_by_backward(graph, uses))
    search.stage_end = whole
    if budget is None and search.most_seconds > graph.base_seconds + one_extra_forward(graph):
        recursive(search, cuts, pinned, needed)
    if budget is not None:
        if search.fastest is None:
            recursive(search, cuts, pinned, needed)
        for candidate in sorted((c for c in single if search.fits(c)), key=lambda c: c.seconds)[:3]:
            spend_rest(search, candidate)
        if single and search.fastest is not None:
            spend_rest(search, min(single, key=lambda c: c.peak_bytes))


def one_extra_forward(graph: Graph) -> float:
    """Seconds of running every forward operation that may be re-run once more."""
    return float(sum(graph.seconds[graph.rerun(i)] for i in graph.forward_ops))


def families(cuts: Cuts) -> list[Positions]:
    """Sets of positions to cut at: after articulation points, and where few bytes cross."""
    inner = np.ones(len(cuts.bytes), dtype=bool)
    inner[[0, -1]] = False
    before = np.concatenate(([True], cuts.bytes[1:] <= cuts.bytes[:-1]))
    after = np.concatenate((cuts.bytes[:-1] <= cuts.bytes[1:], [True]))
    narrow = inner & (cuts.bytes <= np.median(cuts.bytes[inner]) if inner.any() else inner)
    sets = [np.flatnonzero(inner & cuts.articulation), np.flatnonzero(inner & before & after)]
    sets.append(np.flatnonzero(narrow & before & after))
    return [s for s in sets if len(s)]


def weights(graph: Graph, needed: ValueMask) -> PerPosition:
    """For each position the bytes of values computed before it that backward needs."""
    total = np.zeros(graph.forward_length + 1, dtype=np.int64)
    np.add.at(total, graph.producer[needed] + 1, graph.bytes[needed])
    np.cumsum(total, out=total)
    return total


def segment_walls(positions: Positions, weight: PerPosition, size: float) -> list[Position]:
    """Chen's algorithm 3: close a segment at the first allowed position where it reaches ``size``."""
    reached = weight[positions].tolist()
    walls: list[Position] = []
    n, closed = 0, 0
    while (n := bisect_left(reached, closed + size, n)) < len(reached):
        walls.append(Position(int(positions[n])))
        closed = reached[n]
        n += 1
    return walls


def level_walls(
    positions: Positions, weight: PerPosition, held: PerPosition, cuts: Cuts, peak: float
) -> list[Position]:
    """Segments as long as ``peak`` bytes allow beside the cuts kept before them: the first is the
    longest, since when its backward comes the later cuts are free again."""
    walls: list[Position] = []
    start = Position(0)
    load = (weight + held)[positions].tolist()
    amounts = weight.tolist()
    level, previous = 0.0, start
    for position, bytes_ in zip(listed(Position, positions), load, strict=True):
        if bytes_ + level > peak and previous:
            new = cuts.new_bytes(walls[-1] if walls else start, previous)
            level += new - amounts[previous] + (amounts[walls[-1]] if walls else 0)
            walls.append(previous)
        previous = position
    return walls


def held_by_backward(graph: Graph, uses: ForwardUses) -> PerPosition:
    """For each position the bytes of gradients alive when backward has come down to it."""
    lives = lifetimes(graph, graph.base_schedule)
    late = lives.start >= graph.forward_length
    change = np.zeros(graph.base_length + 1, dtype=np.int64)
    np.add.at(change, lives.start[late], graph.bytes[lives.value[late]])
    np.subtract.at(change, lives.end[late] + 1, graph.bytes[lives.value[late]])
    live = np.cumsum(change[:-1])
    held = np.zeros(graph.forward_length + 1, dtype=np.int64)
    read = (uses.last_backward >= 0) & (graph.producer >= 0) & (graph.producer < graph.forward_length)
    np.maximum.at(held, graph.producer[read], live[uses.last_backward[read]])
    smallest: PerPosition = np.minimum.accumulate(np.where(held > 0, held, live[-1]))
    return smallest


def keep_walls(graph: Graph, cuts: Cuts, pinned: ValueMask, walls: list[Position]) -> ValueMask:
    """The kept values: pinned ones, those that cross a wall, and the segment after the last wall."""
    kept = pinned.copy()
    kept |= cuts.kept_at(walls)
    if walls:
        kept |= (graph.producer >= walls[-1]) & (graph.producer < graph.forward_length)
    return kept


def sweep_sizes(weight: PerPosition, positions: Positions, count: int) -> Numbers:
    """Segment sizes from a fraction of the mean segment to everything."""
    return np.geomspace(max(1.0, weight[-1] / len(positions) / 2), max(1.0, float(weight[-1])), count)


def single_level(
    search: Search, cuts: Cuts, pinned: ValueMask, needed: ValueMask, held: PerPosition
) -> list[Candidate]:
    """Sweep the segment size over each family of cuts; every operation is re-run at most once."""
    graph = search.graph
    weight = weights(graph, needed)
    found = [search.try_kept(pinned)]
    sets = families(cuts)
    for n, positions in enumerate(sets):
        sizes = sweep_sizes(weight, positions, SIZES).tolist()
        peaks = (
            sizes if search.budget is None else (search.budget * np.linspace(0.7, 1.05, SIZES // 2)).tolist()
        )
        every = [segment_walls(positions, weight, size) for size in sizes]
        every += [level_walls(positions, weight, held, cuts, peak) for peak in peaks]
        for m, walls in enumerate(every):
            if search.out_of_time():
                return found
            if search.is_new(np.array(walls).tobytes()):
                found.append(search.try_kept(keep_walls(graph, cuts, pinned, walls)))
            search.tell("segments", (n + m / len(every)) / len(sets))
        if search.budget is None and search.least is not None:
            for peak in search.least.peak_bytes * np.linspace(0.7, 1.1, SIZES // 2):
                walls = level_walls(positions, weight, held, cuts, float(peak))
                if not search.out_of_time() and search.is_new(np.array(walls).tobytes()):
                    found.append(search.try_kept(keep_walls(graph, cuts, pinned, walls)))
    return found


def recursive(search: Search, cuts: Cuts, pinned: ValueMask, needed: ValueMask) -> None:
    """Offer schedules of the O(log n)-memory form, for several sizes of the innermost segments and parts a
    level. They are the same for every budget: the best are kept for the next search of the graph."""
    known = _RECURSIVE.get(id(search.graph))
    if known is not None and known[0] is search.constraints:
        for candidate in known[1]:
            search.offer(candidate)
        return
    found = _recursive(search, cuts, pinned, weights(search.graph, needed))
    if not search.out_of_time():
        if known is None:
            weakref.finalize(search.graph, _RECURSIVE.pop, id(search.graph), None)
        _RECURSIVE[id(search.graph)] = search.constraints, undominated(found)


_RECURSIVE: dict[int, tuple[Constraints, list[Candidate]]] = {}
"""By identity of a graph that is alive."""


def undominated(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates on the Pareto front of peak and seconds; of equal ones the first."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.seconds)):
        if not best or candidate.seconds < best[-1].seconds:
            best.append(candidate)
    return best


def _recursive(search: Search, cuts: Cuts, pinned: ValueMask, weight: PerPosition) -> list[Candidate]:
    found: list[Candidate] = []
    if search.graph.forward_length <= FROM_SCRATCH:
        found += from_scratch(search, cuts, pinned, weight)
    for positions in families(cuts):
        for size in sweep_sizes(weight, positions, 12)[:9]:
            walls = segment_walls(positions, weight, size)
            if len(walls) < 3:
                continue
            for parts in (2, 3, 4, 6, 8):
                if search.out_of_time():
                    return found
                if parts <= len(walls) and search.is_new(np.array([*walls, -parts]).tobytes()):
                    found.append(recurse(search, cuts, pinned, walls, parts))
    return found


def from_scratch(search: Search, cuts: Cuts, pinned: ValueMask, weight: PerPosition) -> list[Candidate]:
    """Kept segments within which everything is re-run for every smaller segment in them (or for
    every single backward operation): quadratic in their length, but nothing is held meanwhile."""
    graph = search.graph
    outputs = graph.walk_table.outputs
    found: list[Candidate] = []

    def everything(rows: list[RowId]) -> list[ValueId]:
        return [v for row in rows for v in outputs[row]]

    for positions in families(cuts):
        sizes = [*sweep_sizes(weight, positions, 18).tolist(), 2.0 * float(weight[-1])]
        sets = [segment_walls(positions, weight, size) for size in sizes]
        for n, coarse in enumerate(sets):
            for kept in (keep_walls(graph, cuts, pinned, coarse), cuts.kept_at(coarse)):
                if search.out_of_time():
                    return found
                if not search.is_new(kept.tobytes()):
                    continue
                forms = [forgetting(graph, cuts, fine, 1) for fine in sets[:n] if len(fine) > len(coarse)]
                found += [search.try_kept(kept, forget) for forget in (everything, *forms)]
    return found


def keep_nothing(search: Search) -> None:
    """Judge the schedules that re-run everything for every single backward operation, in small graphs."""
    outputs = search.graph.walk_table.outputs
    if search.graph.forward_length > FROM_SCRATCH:
        return
    nothing = np.zeros(len(search.graph.values), dtype=bool)
    for kept in (nothing, pinned_values(search.graph, forward_uses(search.graph))):
        search.try_kept(kept, lambda rows: [v for row in rows for v in outputs[row]])


def recurse(search: Search, cuts: Cuts, pinned: ValueMask, walls: list[Position], parts: int) -> Candidate:
    """Judge one recursive schedule: stretches between ``walls``, split in ``parts`` at each level."""
    graph = search.graph
    kept_walls = [walls[s - 1] for s in splits(Segment(0), Segment(len(walls)), parts)]
    kept = keep_walls(graph, cuts, pinned, kept_walls)
    return search.try_kept(kept, forgetting(graph, cuts, walls, parts))


def splits(first: Segment, last: Segment, parts: int) -> list[Segment]:
    """Segments at whose start to keep a cut when segments ``first`` to ``last`` are run and the
    backward of ``last`` comes next: ``parts`` equal stretches, the last of them split again."""
    kept: list[Segment] = []
    while last > first:
        length = max(1, -(-(last - first + 1) // parts))
        starts = indices(Segment, last + 1, first + length, length) or [last]
        kept += starts
        first = starts[-1]
    return kept


def forgetting(graph: Graph, cuts: Cuts, walls: list[Position], parts: int) -> Forget:
    """The values of a stretch just re-run to forget: all but its last segment and the cuts of its splits."""
    table = graph.walk_table
    start, end = cuts.start.tolist(), cuts.end.tolist()

    def forget(stretch: list[RowId]) -> list[ValueId]:
        first = Segment(bisect_right(walls, table.base_of[stretch[0]]))
        last = Segment(bisect_right(walls, table.base_of[stretch[-1]]))
        if first == last:
            return []
        kept_edges = [walls[s - 1] for s in splits(first, last, parts)]
        gone: list[ValueId] = []
        for row in stretch:
            if table.base_of[row] >= walls[last - 1]:
                break
            gone += [v for v in table.outputs[row] if not any(start[v] < e <= end[v] for e in kept_edges)]
        return gone

    return forget


def spend_rest(search: Search, candidate: Candidate) -> None:
    """Keep more values, those that save most seconds a byte first, as many as the budget allows."""
    graph = search.graph
    if candidate.kept is None:
        return
    again = np.setdiff1d(
        graph.base_of[candidate.schedule[graph.forward_length :]],
        np.arange(graph.forward_length, graph.base_length),
    )
    is_rerun = np.zeros(graph.base_length, dtype=bool)
    is_rerun[again] = True
    values = np.flatnonzero((graph.producer >= 0) & ~candidate.kept)
    values = values[is_rerun[graph.producer[values]]]
    gain = graph.seconds[graph.recompute_row[values]] / np.maximum(1, graph.bytes[values])
    values = values[np.argsort(-gain, kind="stable")]
    low, high = 0, len(values)
    while low < high and not search.out_of_time():
        middle = (low + high + 1) // 2
        kept = candidate.kept.copy()
        kept[values[:middle]] = True
        if search.fits(search.try_kept(kept)):
            low = middle
        else:
            high = middle - 1
