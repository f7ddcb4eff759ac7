"""Lower sets: Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework of
Recomputation Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019 (arXiv 1905.11722).

Elsewhere: the canonical strategy of an increasing sequence of lower sets, time-centric and
memory-centric.

A sequence of lower sets L1 < L2 < ... of the forward graph: the boundary of each is kept, the rest of
each difference is recomputed when its backward comes. opt[L, time] is the least bytes kept by a
sequence that ends in L and recomputes for ``time``; L may be followed by L' if what is kept, what
L' \\ L computes and the gradients fit together into a level of memory (their equation 5). From one
table the time-centric answer (least time) and the memory-centric ones (more time, fewer bytes kept)
are all simulated, which is their liveness analysis; the level is swept around the budget.

Not optimal: lower sets are prefixes of the captured order, at most ``MOST`` of them; time is counted in
slots; each boundary is kept whole.
"""

import numpy as np

from solvers.model.arrays import PerPosition, Positions
from solvers.model.cut_points import Cuts, find_cuts, forward_uses, pinned_values
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.indices import BaseOp, Position, listed
from solvers.model.solver import solver
from solvers.sqrt_n import held_by_backward, keep_walls, one_extra_forward, weights

NAME = "lower_sets"
MOST = 120
"""Most lower sets in the family."""
SLOTS = 80
"""Into how many slots recomputed time is cut."""


@solver(NAME)
def solve(search: Search) -> None:
    """Solve by dynamic programming over lower sets; the least peak is that at no more than one extra
    forward."""
    everything = search.try_everything()
    if search.is_settled(everything):
        return
    if search.budget is None:
        search.most_seconds = search.graph.base_seconds + one_extra_forward(search.graph)
    improve(search, search.budget, everything.peak_bytes)


def improve(search: Search, budget: int | None, everything: int) -> None:
    """Offer ``search`` the answers of the tables for several levels of memory."""
    graph = search.graph
    uses = forward_uses(graph)
    pinned = pinned_values(graph, uses)
    cuts = find_cuts(graph, uses, pinned)
    weight = weights(graph, (uses.last_backward >= 0) & ~pinned)
    held = held_by_backward(graph, uses)
    positions = family(cuts)
    segments = Segments(graph, cuts, weight, positions)
    levels = everything * np.geomspace(0.1, 1.0, 12) if budget is None else budget * np.linspace(0.75, 1.2, 8)
    for n, level in enumerate(levels):
        for walls in sequences(segments, held[positions], float(level)):
            if search.out_of_time():
                return
            if search.is_new(np.array(walls).tobytes()):
                search.try_kept(keep_walls(graph, cuts, pinned, walls))
        search.tell("lower sets", (n + 1) / len(levels))


def family(cuts: Cuts) -> Positions:
    """The prefixes to choose from: all of a small graph, else the narrowest of equal stretches."""
    inner = np.arange(1, len(cuts.bytes) - 1)
    if len(inner) > MOST:
        inner = np.array([s[cuts.bytes[s].argmin()] for s in np.array_split(inner, MOST)], dtype=np.int64)
    return np.concatenate(([0], inner, [len(cuts.bytes) - 1]))


class Segments:
    """For every pair of prefixes i < j: bytes computed between them, bytes that j newly keeps, and
    seconds to recompute the rest, as matrices ``computed``, ``kept`` and ``seconds``. Prefix i ends at
    ``positions[i]``."""

    def __init__(self, graph: Graph, cuts: Cuts, weight: PerPosition, positions: Positions) -> None:
        count = len(positions)
        seconds = np.array([graph.seconds[graph.rerun(i)] for i in graph.forward_ops])
        running = np.concatenate(([0.0], np.cumsum(seconds)))
        self.positions = positions
        self.total_seconds = float(running[-1])
        self.computed = weight[positions][None, :] - weight[positions][:, None]
        self.kept = np.zeros((count, count))
        self.seconds = np.zeros((count, count))
        for j in range(count):
            crossing = cuts.crossing(Position(int(positions[j])))
            producers = graph.producer[crossing]
            alone = np.array(
                [len(graph.ops[p].outputs) == 1 for p in listed(BaseOp, producers)], dtype=np.float64
            )
            spared = alone * seconds[producers] if len(crossing) else np.zeros(0)
            behind = producers[None, :] >= positions[:j, None]
            self.kept[:j, j] = behind @ graph.bytes[crossing]
            self.seconds[:j, j] = running[positions[j]] - running[positions[:j]] - behind @ spared
        np.maximum(self.seconds, 0.0, out=self.seconds)
        self.seconds[:, -1] = 0.0
        self.kept[:, -1] = 0.0


def sequences(segments: Segments, held: PerPosition, level: float) -> list[list[Position]]:
    """Algorithm 1 of the paper: the walls of a sequence for every time at which fewer bytes are kept."""
    count = len(segments.positions)
    unit = max(1e-9 * segments.total_seconds, float(segments.seconds[0].max()) / SLOTS, 1e-30)
    steps = np.rint(segments.seconds / unit).astype(np.int64)
    least = np.full((count, SLOTS + 1), np.inf)
    origin = np.zeros((count, SLOTS + 1), dtype=np.int64)
    least[0, 0] = 0.0
    for i in range(count - 1):
        reached = np.flatnonzero(np.isfinite(least[i]))
        if not len(reached):
            continue
        following = np.arange(i + 1, count)
        total = least[i, reached][None, :] + (segments.computed[i, following] + held[following])[:, None]
        slot = reached[None, :] + steps[i, following][:, None]
        value = least[i, reached][None, :] + segments.kept[i, following][:, None]
        target = np.broadcast_to(following[:, None], slot.shape)
        fits = (total <= level) & (slot <= SLOTS)
        better = fits.copy()
        better[fits] = value[fits] < least[target[fits], slot[fits]]
        least[target[better], slot[better]] = value[better]
        origin[target[better], slot[better]] = i
    found: list[list[Position]] = []
    lowest = np.inf
    for slot_ in np.flatnonzero(np.isfinite(least[-1])).tolist():
        if least[-1, slot_] >= lowest:
            continue
        lowest = float(least[-1, slot_])
        walls: list[Position] = []
        at, time = count - 1, slot_
        while at:
            before = int(origin[at, time])
            time -= int(steps[before, at])
            at = before
            if at:
                walls.append(Position(int(segments.positions[at])))
        found.append(walls[::-1])
    return found
