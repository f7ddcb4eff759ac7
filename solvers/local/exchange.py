"""Exchanges in a finished schedule: give up memory that is cheap to win back for re-runs that are dear.

Elsewhere: a large-neighbourhood step around the incumbent; eviction across the peak; the second
retention interval of Moccasin (Bartan et al. 2023).

Two kinds of move are read off a schedule, each with its seconds and its bytes at every step:

* *evict*: an instance of a value that is not read for a while is dropped meanwhile, and computed again
  right before its next read. What that needs is held on until then, or computed again as well.
* *spare*: a re-run is taken out, and the instance before it lives on instead.

An integer program chooses the moves that together save most seconds with the profile within the budget:

    x[m] in {0, 1}      move m is made.
    profile(i) + sum of bytes(m, i) x[m] <= budget    for every step i that may become the peak.
    x[m] + x[m'] <= 1   for moves of the same instance, or when one drops what the other reads.

Minimise the sum of seconds(m) x[m]. The chosen moves are made and simulated: where two of them meet in
a way that the sum of bytes does not see, the row is corrected and the program solved again. Rounds
are repeated from the better schedule until none is found. Nothing here knows how the schedule came
to be, so values that are recomputed twice come out of it where that pays.

Not optimal: a local optimum of one round's moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from solvers.local.polish import instances_by_start, is_rerun, prune, reads
from solvers.milp import Program
from solvers.model.arrays import PerStep, Schedule, Steps
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import (
    BaseOp,
    Instance,
    Per,
    Region,
    RowId,
    Step,
    ValueId,
    Variable,
    listed,
    numbered,
)
from solvers.model.schedule import Lifetimes, lifetimes

MOST_STEPS = 1_500
"""Longer schedules are left alone: they have too many moves and rows."""
MOST_MOVES = 1_500
"""The moves that save or cost most seconds a byte beyond this number are left out."""
MOST_ROWS = 6
"""An eviction that takes more re-runs than this is not tried."""
ROUNDS = 8
CORRECTIONS = 6
"""How often a round's program is corrected and solved again."""
SECONDS = 2.0
"""Wall seconds that a program gets at most."""
GAP = 2e-3
NO_STEP = Step(-1)


@dataclass(frozen=True)
class Move:
    """A change of a schedule.

    Attributes:
        seconds: Seconds that it adds to the schedule; negative where it saves some.
        change: Bytes that it adds at every step, int64.
        gone: The step that it takes out, or ``NO_STEP``.
        before: The step before which ``rows`` are inserted, or ``NO_STEP``.
        rows: Rows to run again, in order.
        dropped: ``(instance, from, to)``: dropped after step ``from``, back before step ``to``.
        needed: ``(instance, step)``: instances that must be alive at ``step``.
    """

    seconds: float
    change: PerStep
    gone: Step
    before: Step
    rows: tuple[RowId, ...]
    dropped: tuple[Instance, Step, Step]
    needed: tuple[tuple[Instance, Step], ...]


def exchange(search: Search, candidate: Candidate, budget: int) -> Candidate:
    """Make the moves that pay, round by round; every improvement is offered to ``search``."""
    for _ in range(ROUNDS):
        if len(candidate.schedule) > MOST_STEPS or search.out_of_time():
            break
        better = _round(search, candidate, budget)
        if better is None:
            break
        candidate = better
    return candidate


def _round(search: Search, candidate: Candidate, budget: int) -> Candidate | None:
    graph, schedule = search.graph, candidate.schedule
    moves = find_moves(search, schedule, candidate.timeline.step_bytes, budget)
    if not any(m.seconds < 0 for m in moves):
        return None
    change = np.array([m.change for m in moves])
    if graph.in_flight is not None and graph.forward_length < len(schedule):
        change += (
            graph.in_flight.others * change[:, graph.forward_length, None]
        )  # what crosses, others hold too
    steps = _peaks(candidate.timeline.step_bytes, change, budget)
    unit = max(1.0, budget / 1e4)
    scale = 1000.0 / max(graph.base_seconds, 1e-30)
    program = Program()
    for m in moves:
        program.variable(m.seconds * scale, integer=True)
    for a, b in _conflicts(moves):
        program.row({a: 1.0, b: 1.0}, high=1.0)
    first = len(program.row_low)
    for step in listed(Step, steps):
        column = change[:, step]
        program.row({m: float(column[m]) / unit for m in listed(Variable, np.flatnonzero(column))})
    room = (budget - candidate.timeline.step_bytes[steps]) / unit
    owner = np.zeros(len(schedule) + 1, dtype=np.int64)
    owner[steps] = 1
    owner = np.maximum(np.cumsum(owner) - 1, 0)
    for _ in range(CORRECTIONS):
        program.row_high[first:] = room.tolist()
        left = None if search.time_limit is None else search.time_limit - search.elapsed
        answer = program.solve(
            time_limit=SECONDS if left is None else min(SECONDS, left),
            gap=GAP,
            absolute_gap=1e-3,
            start=np.zeros(len(moves)),
        )
        if answer.values is None or answer.objective >= -1e-6:
            return None
        chosen = [m for m, x in zip(moves, answer.values.tolist(), strict=True) if x > 0.5]
        changed, origin = make(graph, schedule, chosen)
        tried = search.try_schedule(prune(graph, changed))
        if tried.peak_bytes <= budget:
            return tried if tried.seconds < candidate.seconds * (1 - 1e-9) else None
        if not len(steps):
            return None
        whole = search.try_schedule(changed).timeline.step_bytes
        highest = np.zeros(len(steps))
        np.maximum.at(highest, owner[origin], whole)
        predicted = candidate.timeline.step_bytes[steps] + change[answer.values > 0.5][:, steps].sum(axis=0)
        short = highest > budget
        room[short] -= np.maximum(1.0, (highest - predicted)[short] / unit)
        if search.out_of_time():
            return None
    return None


def find_moves(search: Search, schedule: Schedule, profile: PerStep, budget: int) -> list[Move]:
    """All moves of a schedule worth a variable."""
    graph = search.graph
    lives = lifetimes(graph, schedule)
    moves = [*_spares(search, schedule, lives), *_evictions(search, schedule, lives, profile, budget)]
    moves = [m for m in moves if m.seconds < 0 or (m.change < 0).any()]
    if len(moves) > MOST_MOVES:
        top = profile > 0.9 * budget
        worth = [
            -m.seconds / (1 + max(0, int(m.change[top].max(initial=0))))
            if m.seconds < 0
            else -int(m.change[top].min(initial=0)) / (m.seconds + 1e-12)
            for m in moves
        ]
        saving = np.array([m.seconds < 0 for m in moves])
        rank = np.empty(len(moves))
        for kind in (saving, ~saving):
            order = np.argsort(-np.array(worth)[kind], kind="stable")
            rank[np.flatnonzero(kind)[order]] = np.arange(len(order))
        moves = [moves[i] for i in np.sort(np.argsort(rank, kind="stable")[:MOST_MOVES]).tolist()]
    return moves


def _spares(search: Search, schedule: Schedule, lives: Lifetimes) -> list[Move]:
    graph, constraints = search.graph, search.constraints
    firsts = instances_by_start(lives, len(schedule))
    found: list[Move] = []
    for step in listed(Step, np.flatnonzero(is_rerun(graph, schedule))):
        used = [n for n in firsts[step] if lives.used[n]]
        if not used:
            continue
        if constraints.recompute is not None and constraints.recompute[lives.value[used]].any():
            continue
        change = np.zeros(len(schedule), dtype=np.int64)
        for n in used:
            change[lives.end[n - 1] + 1 : step] += graph.bytes[lives.value[n]]
        seconds = -float(graph.seconds[schedule[step]])
        found.append(Move(seconds, change, step, NO_STEP, (), (used[0], step, step), ()))
    return found


def _evictions(
    search: Search, schedule: Schedule, lives: Lifetimes, profile: PerStep, budget: int
) -> list[Move]:
    graph, keep, banned = search.graph, search.constraints.keep, search.constraints.recompute
    table = graph.walk_table
    length = len(schedule)
    first = np.full(len(graph.ops), length, dtype=np.int64)
    first[schedule[::-1]] = np.arange(length - 1, -1, -1)
    following = listed(BaseOp, np.searchsorted(first[: graph.base_length], np.arange(length), side="left"))
    _, read_step, instance = reads(graph, schedule, lives)
    read_at: list[list[Step]] = [[] for _ in lives.start]
    for step, n in zip(listed(Step, read_step), listed(Instance, instance), strict=True):
        read_at[n].append(step)
    held = np.zeros(len(lives.start), dtype=np.int64)
    values, until = graph.held_table
    for v, op in zip(listed(ValueId, values), listed(BaseOp, until), strict=True):
        first_life = int(np.searchsorted(lives.value, v))
        if first_life < len(held) and lives.value[first_life] == v:
            held[first_life] = first[op]
    start, end, value = listed(Step, lives.start), listed(Step, lives.end), listed(ValueId, lives.value)
    instances_of: list[list[Instance]] = [[] for _ in graph.values]
    for n, v in numbered(Instance, value):
        instances_of[v].append(n)

    def latest(v: ValueId, step: Step) -> Instance:
        return next(n for n in reversed(instances_of[v]) if start[n] < step)

    found: list[Move] = []
    for n, uses in numbered(Instance, read_at):
        v = value[n]
        if graph.recompute_row[v] < 0 or (keep is not None and keep[v]) or not graph.bytes[v]:
            continue
        points = sorted({start[n], *uses})
        for before, after in pairwise(points):
            if after < graph.forward_length or after - before < 2 or held[n] > before:
                continue
            region = graph.ops[following[after]].region
            if region != table.recompute_region[v]:
                continue
            for again in (False, True):
                rows, needed = _closure(graph, v, after, again, latest, end, region)
                if not rows or (again and len(rows) == 1):
                    continue
                longer = [w for w in needed if start[w] < graph.forward_length and end[w] < after]
                if banned is not None and any(banned[value[w]] for w in longer):
                    continue  # it would be kept beyond the forward
                change = np.zeros(length, dtype=np.int64)
                change[before + 1 : after] -= graph.bytes[v]
                for w in needed:
                    if end[w] < after:
                        change[end[w] + 1 : after] += graph.bytes[value[w]]
                    if graph.on_demand[value[w]] and not lives.used[w]:
                        change[start[w]] += graph.bytes[value[w]]
                made = sum(int(graph.bytes[o]) for row in rows for o in table.outputs[row] if o != v)
                work = max(int(graph.workspace_bytes[row]) for row in rows)
                live = int(profile[after] - graph.workspace_bytes[schedule[after]])
                live -= sum(int(graph.bytes[o]) for o in table.outputs[schedule[after]])
                if live + made + work > budget:
                    continue
                seconds = float(graph.seconds[list(rows)].sum())
                found.append(
                    Move(
                        seconds,
                        change,
                        NO_STEP,
                        after,
                        rows,
                        (n, before, after),
                        tuple((w, after) for w in needed),
                    )
                )
    return found


def _closure(
    graph: Graph,
    v: ValueId,
    step: Step,
    again: bool,
    latest: Callable[[ValueId, Step], Instance],
    end: Per[Instance, Step],
    region: Region,
) -> tuple[tuple[RowId, ...], tuple[Instance, ...]]:
    """Rows that recompute ``v`` before ``step``, none when that takes too many, and the instances
    that they read. Inputs that are no longer alive are recomputed too if ``again``."""
    table = graph.walk_table
    rows: set[RowId] = set()
    needed: dict[Instance, None] = {}
    pending = [v]
    while pending:
        row = table.recompute_row[pending.pop()]
        if row in rows:
            continue
        rows.add(row)
        if len(rows) > MOST_ROWS:
            return (), ()
        for w in table.inputs[row]:
            n = latest(w, step)
            may = table.recompute_region[w] == region and not graph.on_demand[w]
            if again and may and end[n] < step:
                pending.append(w)
            else:
                needed[n] = None
    return tuple(sorted(rows, key=table.base_of.__getitem__)), tuple(needed)


def _conflicts(moves: Per[Variable, Move]) -> list[tuple[Variable, Variable]]:
    """Pairs of moves that cannot both be made; each move is the variable of its index."""
    by_instance: dict[Instance, list[Variable]] = {}
    readers: dict[Instance, list[tuple[Variable, Step]]] = {}
    for i, m in numbered(Variable, moves):
        by_instance.setdefault(m.dropped[0], []).append(i)
        for n, step in m.needed:
            readers.setdefault(n, []).append((i, step))
    pairs: set[tuple[Variable, Variable]] = set()
    for n, members in by_instance.items():
        for a in members:
            for b in members:
                if a < b and moves[a].dropped == moves[b].dropped:
                    pairs.add((a, b))
        for a in members:
            _, low, high = moves[a].dropped
            for b, step in readers.get(n, []):
                if a != b and moves[a].gone < 0 and low < step <= high:
                    pairs.add((min(a, b), max(a, b)))
    return sorted(pairs)


def _peaks(profile: PerStep, change: PerStep, budget: int) -> Steps:
    """The steps that may exceed the budget, whichever moves are made."""
    most = profile + np.maximum(change, 0).sum(axis=0)
    return np.flatnonzero(most > budget)


def make(graph: Graph, schedule: Schedule, moves: list[Move]) -> tuple[Schedule, Steps]:
    """The schedule with the moves made, and for each of its steps the step of the old one at which,
    or right before which, it stands."""
    base_of = graph.walk_table.base_of
    gone = {m.gone for m in moves if m.gone >= 0}
    inserted: dict[Step, dict[RowId, None]] = {}
    for m in moves:
        if m.before >= 0:
            inserted.setdefault(m.before, {}).update(dict.fromkeys(m.rows))
    rows: list[RowId] = []
    origin: list[Step] = []
    for step, row in numbered(Step, listed(RowId, schedule)):
        again = sorted(inserted.get(step, {}), key=base_of.__getitem__)
        rows += again
        origin += [step] * len(again)
        if step not in gone:
            rows.append(row)
            origin.append(step)
    return np.array(rows, dtype=np.int64), np.array(origin, dtype=np.int64)
