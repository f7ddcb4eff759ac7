"""Local improvement of any schedule: remove re-runs, as the budget allows, and move others later.

Such moves are known as peephole scheduling elsewhere.

Each computation of a value in a schedule is an *instance* of it. A re-run can be removed wherever memory
allows: the instance before it then lives until the last use of the one that is gone. :func:`polish` removes
the re-runs whose results nothing reads, and then those that save most seconds a byte, until none can go.
:func:`delay` moves re-runs to right before their first use. :func:`trade` exchanges values that are kept.
Simulation judges each result.

Not optimal: :func:`polish` removes no re-run that only fits if another one is added.
"""

import numpy as np

from solvers.model.arrays import Instances, Schedule, StepMask, Steps, ValueIds
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import Instance, Per, RowId, Step, ValueId, listed, numbered
from solvers.model.schedule import Lifetimes, lifetimes, simulate


def is_rerun(graph: Graph, schedule: Schedule) -> StepMask:
    """Which steps of a schedule are re-runs: steps that run a row of a re-run, or an operation once more."""
    first = np.full(len(graph.ops), len(schedule), dtype=np.int64)
    first[schedule[::-1]] = np.arange(len(schedule) - 1, -1, -1)
    again = schedule >= graph.base_length
    again |= first[schedule] != np.arange(len(schedule))
    return again


def prune(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule without re-runs whose results nothing reads, and without those that only these read."""
    while True:
        lives = lifetimes(graph, schedule)
        read = np.zeros(len(schedule), dtype=bool)
        read[lives.start[lives.used]] = True
        keep = read | ~is_rerun(graph, schedule)
        if keep.all():
            return schedule
        schedule = schedule[keep]


def polish(search: Search, candidate: Candidate, budget: int) -> Candidate:
    """Remove re-runs from a candidate until no other can go within ``budget``, or time is out.

    ``search`` gets every improvement. A candidate above the budget is pruned only.
    """
    graph = search.graph
    schedule = prune(graph, candidate.schedule)
    if len(schedule) < len(candidate.schedule):
        candidate = search.try_schedule(schedule)
    while candidate.peak_bytes <= budget and not search.out_of_time():
        schedule = remove_reruns(search, candidate.schedule, budget)
        if len(schedule) == len(candidate.schedule):
            break
        candidate = search.try_schedule(prune(graph, schedule))
    return candidate


def remove_reruns(search: Search, schedule: Schedule, budget: int) -> Schedule:
    """The schedule without the re-runs that one pass removes, those that save most seconds a byte first.

    A pass merges an instance at most once: it knows lives as they were before the pass, and merging changes
    them.
    """
    graph, constraints = search.graph, search.constraints
    again = np.flatnonzero(is_rerun(graph, schedule))
    if not len(again):
        return schedule
    profile = simulate(graph, schedule).step_bytes.copy()
    lives = lifetimes(graph, schedule)
    computed = instances_by_start(lives, len(schedule))
    used_by_step = {step: [n for n in computed[step] if lives.used[n]] for step in listed(Step, again)}
    needed = [int(graph.bytes[lives.value[used]].sum()) for used in used_by_step.values()]
    worth = graph.seconds[schedule[again]] / np.maximum(1, needed)
    gone: set[Step] = set()
    end = lives.end
    merged = np.zeros(len(end), dtype=bool)
    for step in listed(Step, again[np.argsort(-worth, kind="stable")]):
        if search.out_of_time():
            break
        used = used_by_step[step]
        if constraints.recompute is not None and constraints.recompute[lives.value[used]].any():
            continue
        # Instances are in order of value, then of start: n - 1 is the one before of the same value.
        if merged[used].any() or merged[[n - 1 for n in used]].any():
            continue
        size = int(graph.bytes[lives.value[used]].sum())
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
    """For each step the instances that it computes."""
    table: list[list[Instance]] = [[] for _ in range(length)]
    for n, start in numbered(Instance, listed(Step, lives.start)):
        table[start].append(n)
    return table


def delay(search: Search, candidate: Candidate) -> Candidate:
    """Move re-runs to right before their first use; ``search`` gets the schedule that results."""
    graph = search.graph
    schedule = candidate.schedule
    again = is_rerun(graph, schedule)
    lives = lifetimes(graph, schedule)
    computed = instances_by_start(lives, len(schedule))
    _, read_step, instance = reads(graph, schedule, lives)
    first_use = np.full(len(lives.start), len(schedule), dtype=np.int64)
    np.minimum.at(first_use, instance, read_step)
    position = np.arange(len(schedule), dtype=np.float64)
    for step in listed(Step, np.flatnonzero(again)[::-1]):
        use = min((int(first_use[n]) for n in computed[step] if lives.used[n]), default=step)
        if use < len(schedule) and use > step + 1:
            position[step] = np.nextafter(position[use], -1)
    moved = schedule[np.argsort(position, kind="stable")]
    if np.array_equal(moved, schedule):
        return candidate
    return search.try_schedule(moved)


def reads(graph: Graph, schedule: Schedule, lives: Lifetimes) -> tuple[ValueIds, Steps, Instances]:
    """Every read in a schedule, as three arrays: the value, the step that reads it, the instance it reads."""
    offsets, flat = graph.input_table
    counts = offsets[schedule + 1] - offsets[schedule]
    step = np.repeat(np.arange(len(schedule), dtype=np.int64), counts)
    begin = np.repeat(offsets[schedule] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    value = flat[begin + np.arange(len(step), dtype=np.int64)]
    length = len(schedule) + 1
    instance = np.searchsorted(lives.value * length + lives.start, value * length + step, side="left") - 1
    return value, step, instance


def trade(search: Search, candidate: Candidate, *, rounds: int = 3) -> Candidate:
    """Keep a recomputed value; where that exceeds the budget, recompute a cheaper kept one in exchange.

    Args:
        search: Tries the exchanges, until time is out.
        candidate: One that was made from kept values; any other is returned as it is.
        rounds: How often all values are gone through, as long as a round helps.
    """
    graph = search.graph
    for _ in range(rounds):
        if candidate.kept is None:
            break
        before = candidate.seconds
        free = (graph.recompute_row >= 0) & (graph.bytes > 0)
        again = np.zeros(len(graph.values), dtype=bool)
        for row in listed(RowId, candidate.schedule[is_rerun(graph, candidate.schedule)]):
            again[list(graph.ops[row].outputs)] = True
        kept_before = np.flatnonzero(free & candidate.kept)
        recomputed = np.flatnonzero(free & again & ~candidate.kept)
        recomputed = recomputed[np.argsort(-graph.seconds[graph.recompute_row[recomputed]])]
        for v in listed(ValueId, recomputed):
            if search.out_of_time():
                return candidate
            kept = np.array(candidate.kept)
            kept[v] = True
            tried = search.try_kept(kept)
            if search.fits(tried) and tried.seconds < candidate.seconds:
                candidate = tried
                continue
            cheaper = graph.seconds[graph.recompute_row[kept_before]] < graph.seconds[graph.recompute_row[v]]
            for w in listed(ValueId, kept_before[cheaper]):
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
