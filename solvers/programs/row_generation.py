"""The single-recompute program with memory rows only where they bind.

Elsewhere: row generation, cutting planes; compare :mod:`solvers.programs.ilp`, whose program has a row for
every moment and therefore walls to bound its size.

The schedules are those of :mod:`solvers.programs.ilp` without walls. Written is a row for each of a few
*moments* M only, to begin with the highest point of the captured order, and re-run variables r[o, m]
only for the moments of M at which a result of o may be alive: they are exact for M, whatever
happens in between. Every answer is simulated; where its profile exceeds the budget the highest points
become moments, or their rows are corrected, and the program is solved again. In chains and
transformers a handful of moments is enough. Moments found for one budget are where another one begins.

Not optimal: nothing is recomputed twice, corrections are greedy, gaps are those of ``ilp``.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from solvers.local.polish import polish
from solvers.milp import Outcome, Program
from solvers.model.arrays import BaseOpPerValue, PerBaseOp, PerStep, PerVariable, Schedule, ValueMask
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.cut_points import ForwardUses, forward_uses, last_forward_use, pinned_values
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import BaseOp, Per, ProgramRow, ValueId, Variable, base_op, listed, numbered
from solvers.model.schedule import simulate
from solvers.programs.single_recompute import (
    SECONDS,
    SingleRecompute,
    find_readers,
    fixed_bytes,
)

ROUNDS = 20
"""How often the program is solved at most."""
NEW_MOMENTS = 8
"""Moments that one simulation adds at most."""
REACH = (0.05, 0.2, 1.0)
"""How far back chains of re-runs that a moment causes are followed, as fractions of the forward phase: the
next one where simulation shows that the last was too short."""
SLIGHTLY = 1.02
"""Answers above the budget by less than this factor are brought down by corrections."""
APART = 60
"""New moments of one simulation are this fraction of the step apart."""
ROUNDED = 1e-6
"""A rounded point this close to the relaxed program, as a fraction of the step, is as good as solved."""
MOST_INTEGER = 8_000
"""Programs of more variables are rounded only."""
MOST_VARIABLES = 60_000
"""Larger programs are left alone."""
GAPS = (0.005, 0.001, 0.0001)
"""Relative gaps of the recomputed seconds at which the program counts as solved: while moments are added,
after that, and in the end with all values free. A twentieth of each, relative to the seconds of the step, is
enough as well."""
GIVE_UP_ROUNDS = 3
"""From this round on a budget may be given up."""
GIVE_UP_FACTOR = 1.5
"""It is given up where the answer is still above it by this factor."""


@dataclass
class LazyRows:
    """The parts that budgets of one graph share: uses, pinned values, and the program that all begin with."""

    graph: Graph
    constraints: Constraints = NO_CONSTRAINTS

    def __post_init__(self) -> None:
        self.uses: ForwardUses = forward_uses(self.graph)
        self.pinned: ValueMask = pinned_values(self.graph, self.uses)
        profile = simulate(self.graph, self.graph.base_schedule).step_bytes
        self.first: tuple[BaseOp, ...] = (base_op(int(profile.argmax())),) if len(profile) else ()
        self._written: dict[tuple[tuple[BaseOp, ...], float, bool], SingleRecompute] = {}

    def kept(self, small: bool) -> ValueMask:
        """The values that are kept whatever happens, those too small to matter not among them if the
        program decides about ``small`` values as well."""
        return self.graph.recompute_row < 0 if small else self.pinned

    def program(self, moments: tuple[BaseOp, ...], reach: float, small: bool = False) -> SingleRecompute:
        """The program with rows for these moments."""
        key = moments, reach, small
        if key not in self._written:
            pinned = self.kept(small)
            causes = find_causes(self.graph, self.uses, pinned, self.constraints, moments, reach)
            program = write(self.graph, self.uses, causes, moments)
            if moments != self.first:
                return program
            self._written[key] = program
        return self._written[key]


def improve(search: Search, budget: int, lazy: LazyRows | None = None, *, seconds: float = np.inf) -> bool:
    """Offer ``search`` the program's answers to a budget, the programs taking at most ``seconds`` process
    seconds in all. True when the program was solved to its gap and its answer fits."""
    graph = search.graph
    lazy = lazy or LazyRows(graph, search.constraints)
    end = search.process_elapsed + seconds
    moments, correction, level, rounds, stage = lazy.first, dict[BaseOp, float](), 0, 0, 0
    for n in range(ROUNDS):
        left = search.wall(end - search.process_elapsed)
        small = stage == len(GAPS) - 1
        model = lazy.program(moments, REACH[level] * graph.forward_length, small)
        if search.out_of_time() or left <= 0 or len(model.program.cost) > MOST_VARIABLES:
            return stage > 1
        model.correction[:] = [correction.get(m, 0.0) for m in moments]
        model.set_budget(budget)
        relaxed = model.program.solve(relax=True, time_limit=None if np.isinf(left) else left)
        values = relaxed.values
        if values is None:
            return stage > 1
        candidate = round_off(search, model, values, lazy.kept(small), budget)
        search.tell("rows", (n + 1) / ROUNDS)
        least = graph.base_seconds * (1 + relaxed.objective / SECONDS + ROUNDED)
        if search.fastest is not None and search.fastest.seconds <= least:
            if small:
                return True
            stage = len(GAPS) - 1
            continue
        left = search.wall(end - search.process_elapsed)
        solved = False
        if len(values) <= MOST_INTEGER and left > 0:
            best = model.program.solve(
                time_limit=None if np.isinf(left) else left / 2,
                gap=GAPS[stage],
                absolute_gap=GAPS[stage] * SECONDS / 20,
                start=model.start(search.fastest),
                presolve=stage > 0,
            )
            if best.outcome is Outcome.INFEASIBLE:
                return stage > 1
            if best.values is not None:
                values, solved = best.values, best.outcome is Outcome.OPTIMAL
                candidate = search.try_kept(chosen(model, values, lazy.kept(small), 0.5))
        if candidate.peak_bytes <= budget:
            if small or not solved:
                return solved or stage > 1
            reached = (best.objective - max(best.bound, relaxed.objective)) / SECONDS
            stage += 1
            while stage < len(GAPS) - 1 and reached <= GAPS[stage] / 20:
                stage += 1
            continue
        if n >= GIVE_UP_ROUNDS and candidate.peak_bytes > GIVE_UP_FACTOR * budget:
            return stage > 1
        highest = profile_by_base(graph, candidate.schedule, candidate.timeline.step_bytes)
        over = highest_over(highest, budget, moments)
        rounds += 1
        near = candidate.peak_bytes <= budget * SLIGHTLY
        if level + 1 < len(REACH) and not near and (not over or rounds == 2):
            level, rounds = level + 1, 0
        elif not over or near:
            excess = highest[model.moments] - model.use(values)
            for moment, most, more in zip(moments, highest[model.moments], excess, strict=True):
                if most > budget:
                    correction[moment] = max(correction.get(moment, 0.0) + 1, float(more))
        moments = tuple(sorted({*moments, *over}))
    return stage > 1


def chosen(model: SingleRecompute, values: PerVariable, pinned: ValueMask, least: float) -> ValueMask:
    """The values that a point of the program keeps, at least to a share of ``least``, and pinned ones."""
    kept = pinned | (model.keep < 0)
    decided = model.keep >= 0
    kept[decided] = values[model.keep[decided]] >= least
    return kept


def round_off(
    search: Search, model: SingleRecompute, values: PerVariable, pinned: ValueMask, budget: int
) -> Candidate:
    """Judge roundings of a fractional point: the most of it that fits, found by bisection, polished; the
    nearest rounding when none fits."""
    nearest = search.try_kept(chosen(model, values, pinned, 0.5))
    decided = np.flatnonzero(model.keep >= 0)
    shares = values[model.keep[decided]].round(3)
    order = decided[np.argsort(-shares, kind="stable")]
    low, high, best = int((shares == 1).sum()), int((shares > 0).sum()), None
    while low <= high and not search.out_of_time():
        middle = (low + high) // 2
        kept = pinned | (model.keep < 0)
        kept[order[:middle]] = True
        candidate = search.try_kept(kept)
        if candidate.peak_bytes <= budget:
            best, low = candidate, middle + 1
        else:
            high = middle - 1
    return nearest if best is None else polish(search, best, budget)


def profile_by_base(graph: Graph, schedule: Schedule, step_bytes: PerStep) -> PerBaseOp:
    """For each base operation the highest simulated bytes at it and at re-runs right before it."""
    first = np.full(len(graph.ops), len(schedule), dtype=np.int64)
    first[schedule[::-1]] = np.arange(len(schedule) - 1, -1, -1)
    following = np.searchsorted(first[: graph.base_length], np.arange(len(schedule)), side="left")
    highest = np.zeros(graph.base_length)
    np.maximum.at(highest, np.minimum(following, graph.base_length - 1), step_bytes)
    return highest


def highest_over(profile: PerBaseOp, budget: int, moments: tuple[BaseOp, ...]) -> list[BaseOp]:
    """The highest points above the budget, apart from each other and none of the moments."""
    apart = max(1, len(profile) // APART)
    chosen: list[BaseOp] = []
    over = np.setdiff1d(np.flatnonzero(profile > budget), np.array(moments))
    for moment in listed(BaseOp, over[np.argsort(-profile[over], kind="stable")]):
        if all(abs(moment - other) >= apart for other in chosen):
            chosen.append(moment)
            if len(chosen) == NEW_MOMENTS:
                break
    return chosen


@dataclass(frozen=True)
class Causes:
    """When re-runs may be caused, by moment; ``graph.base_length`` stands for after all moments.

    Attributes:
        free: Values about which the program decides, bool.
        times: For each forward operation the moments that matter, ascending; empty for one that
            never needs to be re-run.
        direct: For each value the moment by which backward has read it; -1 when it never does.
        readers: For each value the forward operations whose re-run reads it.
        end: For each value the last backward operation at which a kept instance may be alive.
    """

    free: ValueMask
    times: Per[BaseOp, list[BaseOp]]
    direct: BaseOpPerValue
    readers: Per[ValueId, list[BaseOp]]
    end: BaseOpPerValue


def find_causes(
    graph: Graph,
    uses: ForwardUses,
    pinned: ValueMask,
    constraints: Constraints,
    moments: tuple[BaseOp, ...],
    reach: float,
) -> Causes:
    """By which of the moments every operation may have been re-run, by chains of re-runs that span at
    most ``reach`` forward operations."""
    decided = (graph.recompute_row >= 0) & ~constraints.apply(pinned.copy())
    readers = find_readers(graph, decided)
    # Lists, which are read and written one by one in a fraction of the time that arrays take.
    direct = [base_op(-1)] * len(graph.values)
    end = listed(BaseOp, uses.last_backward)
    times: list[list[BaseOp]] = [[] for _ in graph.forward_ops]
    root: list[dict[BaseOp, BaseOp]] = [{} for _ in graph.forward_ops]
    latest = [base_op(-1)] * graph.forward_length
    free = [False] * len(graph.values)
    after_all = base_op(graph.base_length)
    ticks = [*moments, after_all]
    first_backward = listed(BaseOp, uses.first_backward)
    alive = last_reads(graph, uses, decided)
    made, is_decided = graph.walk_table.outputs, decided.tolist()
    for i in reversed(graph.forward_ops):
        own: dict[BaseOp, BaseOp] = {}
        for v in made[i]:
            if not is_decided[v]:
                continue
            read = first_backward[v]
            again = [r for r in readers[v] if times[r]]
            if read >= 0:
                moment = ticks[bisect_left(ticks, read)]
                direct[v] = moment
                own[moment] = i
                latest[i] = max(latest[i], read)
            else:
                latest[i] = max([latest[i], *(latest[r] for r in again)])
            for r in again:
                for t, origin in root[r].items():
                    if read < 0 or t < direct[v]:
                        own[t] = max(own.get(t, origin), origin)
            end[v] = max([end[v], *(latest[r] for r in again)])
            free[v] = read >= 0 or bool(again)
        near = {t: origin for t, origin in own.items() if t <= alive[i] and origin - i <= reach}
        if len(near) < len(own):
            near[after_all] = max(own.values())
        root[i], times[i] = near, sorted(near)
    found = np.array(direct, dtype=np.int64), readers, np.array(end, dtype=np.int64)
    return Causes(np.array(free, dtype=bool), times, *found)


def last_reads(graph: Graph, uses: ForwardUses, decided: ValueMask) -> Per[BaseOp, int]:
    """For each forward operation the last backward operation that reads a decided value of it, or of an
    operation that its re-run may need to re-run: no later moment needs a variable for it."""
    last = [-1] * graph.forward_length
    table, producer = graph.walk_table, listed(BaseOp, graph.producer)
    read, is_decided = listed(BaseOp, uses.last_backward), decided.tolist()
    for i in graph.forward_ops:
        made = [read[v] for v in table.outputs[i] if is_decided[v]]
        inputs = table.inputs[graph.rerun(i)]
        needed = [last[producer[v]] for v in inputs if is_decided[v] and producer[v] < i]
        last[i] = max([-1, *made, *needed])
    return last


def write(graph: Graph, uses: ForwardUses, causes: Causes, moments: tuple[BaseOp, ...]) -> SingleRecompute:
    """Write the program with a memory row for each of the moments."""
    program = Program()
    scale = SECONDS / max(graph.base_seconds, 1e-30)
    unit = max(1.0, float(graph.bytes.sum()) / 1e4)
    free = np.flatnonzero(causes.free)
    keep = np.full(len(graph.values), -1, dtype=np.int64)
    for v in listed(ValueId, free):
        keep[v] = program.variable(integer=True)
    rerun: list[list[Variable]] = []
    seconds = graph.seconds.tolist()
    for i, times in numbered(BaseOp, causes.times):
        cost = seconds[graph.rerun(i)] * scale
        rerun.append([program.variable(cost if k == len(times) - 1 else 0.0) for k in range(len(times))])
        for earlier, later in pairwise(rerun[-1]):
            program.row({later: 1.0, earlier: -1.0}, low=0.0)
    producer, kept = listed(BaseOp, graph.producer), listed(Variable, keep)
    directs = listed(BaseOp, causes.direct)
    for v in listed(ValueId, free):
        i, direct = producer[v], directs[v]
        times = causes.times[i]
        if direct >= 0:
            program.row({rerun[i][bisect_left(times, direct)]: 1.0, kept[v]: 1.0}, low=1.0)
        for reader in causes.readers[v]:
            for time, variable in zip(causes.times[reader], rerun[reader], strict=True):
                if 0 <= direct <= time:
                    break
                own = rerun[i][bisect_left(times, time)]
                program.row({own: 1.0, kept[v]: 1.0, variable: -1.0}, low=0.0)
    model = SingleRecompute(
        program,
        keep,
        np.array(moments, dtype=np.int64),
        ProgramRow(len(program.row_low)),
        fixed_bytes(graph, uses, causes.free, causes.end)[list(moments)],
        np.zeros(len(moments)),
        unit,
    )
    last_use = last_forward_use(graph)
    made = [(i, v) for v in listed(ValueId, free) if causes.times[i := producer[v]]]
    others = 0 if graph.in_flight is None else graph.in_flight.others
    across = free[(last_use[free] < graph.forward_length) & (causes.end[free] >= graph.forward_length)]
    # Values that other micro-batches send count as fixed in the forward.
    unsent = across if graph.in_flight is None else across[~np.isin(across, graph.in_flight.sent)]
    for moment in moments:
        alive = free[(last_use[free] < moment) & (moment <= causes.end[free])]
        held = unsent if moment < graph.forward_length else across
        row = {kept[v]: others * float(graph.bytes[v]) / unit for v in listed(ValueId, held)}
        for v in listed(ValueId, alive):
            row[kept[v]] = row.get(kept[v], 0.0) + float(graph.bytes[v]) / unit
        for i, v in made:
            if causes.times[i][0] <= moment <= uses.last_backward[v]:
                variable = rerun[i][bisect_right(causes.times[i], moment) - 1]
                row[variable] = row.get(variable, 0.0) + float(graph.bytes[v]) / unit
        program.row(row)
    return model
