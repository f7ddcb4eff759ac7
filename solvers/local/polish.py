"""Local improvement of any schedule: take out re-runs, as the budget allows, and move others later.

Elsewhere: "eager eviction" turned round, peephole scheduling.

Every value is computed once in the forward phase, so a re-run can be taken out of a schedule
whenever memory allows: the earlier instance then lives until the re-run's last use. Three moves,
until none helps: take out re-runs whose results nothing reads; take out re-runs, dearest per byte
first, where the profile leaves room for the longer life; move re-runs later, to right before their
first use, where that lowers the peak. Each move is judged by simulation.

Not optimal: one re-run at a time; no move makes one saving to pay for another (``trade`` tries
pairs of kept values).
"""

import numpy as np

from solvers.model.arrays import Instances, Schedule, StepMask, Steps, ValueIds
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import Instance, Per, RowId, Step, ValueId, listed, numbered
from solvers.model.schedule import Lifetimes, lifetimes, simulate


def is_rerun(graph: Graph, schedule: Schedule) -> StepMask:
    """Which steps of a schedule are re-runs, bool."""
    first = np.full(len(graph.ops), len(schedule), dtype=np.int64)
    first[schedule[::-1]] = np.arange(len(schedule) - 1, -1, -1)
    again = schedule >= graph.base_length
    again |= first[schedule] != np.arange(len(schedule))
    return again


def prune(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule without re-runs whose results nothing reads."""
    while True:
        lives = lifetimes(graph, schedule)
        read = np.zeros(len(schedule), dtype=bool)
        read[lives.start[lives.used]] = True
        keep = read | ~is_rerun(graph, schedule)
        if keep.all():
            return schedule
        schedule = schedule[keep]


def polish(search: Search, candidate: Candidate, budget: int) -> Candidate:
    """Improve a candidate within ``budget`` until nothing helps or time is out; every improvement is
    offered to ``search``. A candidate above the budget is returned as it is, pruned."""
    graph = search.graph
    schedule = prune(graph, candidate.schedule)
    if len(schedule) < len(candidate.schedule):
        candidate = search.try_schedule(schedule)
    while candidate.peak_bytes <= budget and not search.out_of_time():
        schedule = take_out(graph, candidate.schedule, budget, search.constraints, search)
        if len(schedule) == len(candidate.schedule):
            break
        candidate = search.try_schedule(prune(graph, schedule))
    return candidate


def take_out(
    graph: Graph, schedule: Schedule, budget: int, constraints: Constraints, search: Search
) -> Schedule:
    """One pass of taking out re-runs, those that save most seconds for the bytes first."""
    again = np.flatnonzero(is_rerun(graph, schedule))
    if not len(again):
        return schedule
    profile = simulate(graph, schedule).step_bytes.copy()
    lives = lifetimes(graph, schedule)
    firsts = instances_by_start(lives, len(schedule))
    needed = [
        sum(int(graph.bytes[lives.value[n]]) for n in firsts[step] if lives.used[n])
        for step in listed(Step, again)
    ]
    worth = graph.seconds[schedule[again]] / np.maximum(1, needed)
    gone: set[Step] = set()
    end = lives.end.copy()
    merged = np.zeros(len(end), dtype=bool)
    for step in listed(Step, again[np.argsort(-worth, kind="stable")]):
        if search.out_of_time():
            break
        used = [n for n in firsts[step] if lives.used[n]]
        if constraints.recompute is not None and constraints.recompute[lives.value[used]].any():
            continue
        if merged[used].any() or merged[[n - 1 for n in used]].any():
            continue
        size = 0
        for n in used:
            size += int(graph.bytes[lives.value[n]])
        begin = min((int(end[n - 1]) for n in used), default=step) + 1
        if begin < step and int(profile[begin:step].max()) + size > budget:
            continue
        for n in used:
            profile[end[n - 1] + 1 : step] += int(graph.bytes[lives.value[n]])
            merged[[n - 1, n]] = True
        gone.add(step)
    keep = np.ones(len(schedule), dtype=bool)
    keep[list(gone)] = False
    shorter = schedule[keep]
    if gone and simulate(graph, shorter).peak_bytes > budget:
        return schedule
    return shorter


def instances_by_start(lives: Lifetimes, length: int) -> Per[Step, list[Instance]]:
    """The instances computed at each step."""
    table: list[list[Instance]] = [[] for _ in range(length)]
    for n, start in numbered(Instance, listed(Step, lives.start)):
        table[start].append(n)
    return table


def delay(search: Search, candidate: Candidate) -> Candidate:
    """Move re-runs to right before their first use where that lowers the peak."""
    graph = search.graph
    schedule = candidate.schedule
    again = is_rerun(graph, schedule)
    lives = lifetimes(graph, schedule)
    firsts = instances_by_start(lives, len(schedule))
    _, read_step, instance = reads(graph, schedule, lives)
    first_use = np.full(len(lives.start), len(schedule), dtype=np.int64)
    np.minimum.at(first_use, instance, read_step)
    position = np.arange(len(schedule), dtype=np.float64)
    for step in listed(Step, np.flatnonzero(again)[::-1]):
        use = min((int(first_use[n]) for n in firsts[step] if lives.used[n]), default=step)
        if use < len(schedule) and use > step + 1:
            position[step] = np.nextafter(position[use], -1)
    moved = schedule[np.argsort(position, kind="stable")]
    if np.array_equal(moved, schedule):
        return candidate
    return search.try_schedule(moved)


def reads(graph: Graph, schedule: Schedule, lives: Lifetimes) -> tuple[ValueIds, Steps, Instances]:
    """Every read of a schedule: (value, step, instance that is read)."""
    offsets, flat = graph.input_table
    counts = offsets[schedule + 1] - offsets[schedule]
    step = np.repeat(np.arange(len(schedule), dtype=np.int64), counts)
    begin = np.repeat(offsets[schedule] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    value = flat[begin + np.arange(len(step), dtype=np.int64)]
    length = len(schedule) + 1
    instance = np.searchsorted(lives.value * length + lives.start, value * length + step, side="left") - 1
    return value, step, instance


def trade(search: Search, candidate: Candidate, *, rounds: int = 3) -> Candidate:
    """Keep one more value for one less: all pairs near in size, while time lasts."""
    graph = search.graph
    for _ in range(rounds):
        if candidate.kept is None:
            break
        before = candidate.seconds
        free = (graph.recompute_row >= 0) & (graph.bytes > 0)
        again = np.zeros(len(graph.values), dtype=bool)
        for row in listed(RowId, candidate.schedule[is_rerun(graph, candidate.schedule)]):
            again[list(graph.ops[row].outputs)] = True
        out = np.flatnonzero(free & candidate.kept)
        into = np.flatnonzero(free & again & ~candidate.kept)
        into = into[np.argsort(-graph.seconds[graph.recompute_row[into]])]
        for v in listed(ValueId, into):
            if search.out_of_time():
                return candidate
            kept = np.array(candidate.kept)
            kept[v] = True
            tried = search.try_kept(kept)
            if search.fits(tried) and tried.seconds < candidate.seconds:
                candidate = tried
                continue
            cheaper = graph.seconds[graph.recompute_row[out]] < graph.seconds[graph.recompute_row[v]]
            for w in listed(ValueId, out[cheaper]):
                if search.out_of_time():
                    return candidate
                swapped = kept.copy()
                swapped[w] = False
                tried = search.try_kept(swapped)
                if search.fits(tried) and tried.seconds < candidate.seconds:
                    candidate = tried
                    break
        if candidate.seconds >= before:
            break
    return candidate
