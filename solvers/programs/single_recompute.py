"""The tables and rows of the integer program that :mod:`solvers.programs.ilp` specifies.

It decides which values to keep when nothing is recomputed twice.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from solvers.milp import Program
from solvers.model.arrays import (
    BaseOpPerValue,
    BaseOps,
    BlockPerOp,
    PerBaseOp,
    PerMoment,
    PerVariable,
    ValueMask,
    VariablePerValue,
)
from solvers.model.constraints import Constraints
from solvers.model.cut_points import ForwardUses, last_forward_use
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate
from solvers.model.indices import (
    BaseOp,
    Per,
    Position,
    ProgramRow,
    Segment,
    ValueId,
    Variable,
    base_op,
    listed,
    numbered,
)

SECONDS = 1000.0
"""The objective's unit: the seconds of the step without recomputation are this many."""


MOST_FORWARD = 64
"""Most memory rows for moments of the forward phase; each segment has one at most."""
MOST_ENTRIES = 600_000
"""Most coefficients of all memory rows together; of large graphs without narrow cuts fewer moments get
a row, the highest of each stretch, and simulation finds the rest."""


@dataclass(frozen=True)
class Stages:
    """Which operations may be re-run, and when.

    Attributes:
        free: Values about which the program decides, bool.
        segment: Segment of every forward operation.
        times: For each forward operation the backward operations (rounded down to stages) that may
            cause its re-run, ascending; empty for one that never needs to be re-run.
        direct: For each value the stage of its first backward use; -1 for a value without.
        readers: For each value the forward operations whose re-run reads it.
        end: For each value the last backward operation at which a kept instance may be alive.
    """

    free: ValueMask
    segment: BlockPerOp
    times: Per[BaseOp, list[BaseOp]]
    direct: BaseOpPerValue
    readers: Per[ValueId, list[BaseOp]]
    end: BaseOpPerValue


def find_stages(
    graph: Graph,
    uses: ForwardUses,
    pinned: ValueMask,
    constraints: Constraints,
    walls: list[Position],
    stages: int,
) -> Stages:
    """Cut the forward phase at ``walls`` and find for every operation the times that matter.

    A re-run is caused from within its own segment only, and a segment has at most ``stages`` times.
    """
    segment = np.searchsorted(np.array(walls, dtype=np.int64), np.arange(graph.forward_length), side="right")
    regions = graph.region[: graph.forward_length]
    if graph.forward_length:
        segment = segment + np.concatenate(([0], np.cumsum(regions[1:] != regions[:-1])))
    kept = constraints.apply(pinned.copy())
    decided = (graph.recompute_row >= 0) & ~kept
    readers = find_readers(graph, decided)
    grid: dict[Segment, list[BaseOp]] = {}
    segments, producer = listed(Segment, segment), listed(BaseOp, graph.producer)
    first_backward = listed(BaseOp, uses.first_backward)
    for v in listed(ValueId, np.flatnonzero(decided & (uses.first_backward >= 0))):
        grid.setdefault(segments[producer[v]], []).append(first_backward[v])
    grid = {g: thin(sorted(set(times)), stages) for g, times in grid.items()}
    direct = np.full(len(graph.values), -1, dtype=np.int64)
    end = uses.last_backward.copy()
    times: list[list[BaseOp]] = [[] for _ in graph.forward_ops]
    free = np.zeros(len(graph.values), dtype=bool)
    for i in reversed(graph.forward_ops):
        own: set[BaseOp] = set()
        for v in graph.walk_table.outputs[i]:
            if not decided[v]:
                continue
            if first_backward[v] >= 0:
                ticks = grid[segments[i]]
                stage = ticks[max(0, bisect_right(ticks, first_backward[v]) - 1)]
                direct[v] = stage
                own.add(stage)
            for reader in readers[v]:
                if times[reader]:
                    end[v] = max(end[v], times[reader][-1])
                    if segments[reader] == segments[i]:
                        own.update(times[reader])
            free[v] = direct[v] >= 0 or end[v] >= 0
        times[i] = sorted(own)
    return Stages(free, segment, times, direct, readers, end)


def find_readers(graph: Graph, decided: ValueMask) -> list[list[BaseOp]]:
    """For each of the decided values the forward operations whose re-run reads it."""
    readers: list[list[BaseOp]] = [[] for _ in graph.values]
    table, is_decided = graph.walk_table, decided.tolist()
    for i in graph.forward_ops:
        op = graph.ops[i]
        if op.recomputable:
            for v in table.inputs[graph.rerun(i)]:
                if is_decided[v] and table.recompute_region[v] == op.region:
                    readers[v].append(i)
    return readers


def thin(times: list[BaseOp], most: int) -> list[BaseOp]:
    """At most ``most`` of the times, evenly, the first among them."""
    if len(times) <= most:
        return times
    return [times[len(times) * k // most] for k in range(most)]


@dataclass
class SingleRecompute:
    """The program with a row for every moment of the step that may be its peak.

    Attributes:
        program: The linear program; its memory rows come last, one for each of ``moments``.
        keep: Variable of every value; -1 where nothing is decided.
        moments: The base operations that the memory rows stand for, ascending.
        first_row: The first memory row.
        fixed: For each memory row the bytes that do not depend on the decisions.
        correction: For each memory row the bytes by which simulation found it too low.
        unit: Bytes of one unit in the memory rows.
    """

    program: Program
    keep: VariablePerValue
    moments: BaseOps
    first_row: ProgramRow
    fixed: PerMoment
    correction: PerMoment
    unit: float

    def set_budget(self, budget: int) -> None:
        """Write the right-hand sides of the memory rows for a budget in bytes."""
        limit = (budget - self.fixed - self.correction) / self.unit
        self.program.row_high[self.first_row :] = limit.tolist()

    def use(self, values: PerVariable) -> PerMoment:
        """Bytes that each memory row accounts for at a point of the program."""
        program = self.program
        begin = program.row_start[self.first_row]
        terms = (
            np.array(program.coefficient[begin:]) * values[np.array(program.index[begin:], dtype=np.int64)]
        )
        offsets = np.array(program.row_start[self.first_row : -1], dtype=np.int64) - begin
        total = np.add.reduceat(np.concatenate((terms, [0.0])), offsets) if len(offsets) else np.zeros(0)
        total[np.diff(program.row_start[self.first_row :]) == 0] = 0.0
        total *= self.unit
        total += self.fixed
        return total

    def start(self, candidate: Candidate | None) -> PerVariable | None:
        """The choice of a known answer, as a point to start from: NaN where it says nothing."""
        if candidate is None or candidate.kept is None:
            return None
        point = np.full(len(self.program.cost), np.nan)
        decided = self.keep >= 0
        point[self.keep[decided]] = candidate.kept[decided]
        return point

    def kept(self, values: PerVariable, otherwise: ValueMask) -> ValueMask:
        """Which values a point of the program keeps; ``otherwise`` where it does not decide."""
        kept = otherwise.copy()
        decided = self.keep >= 0
        kept[decided] = values[self.keep[decided]] > 0.5
        return kept


def write_program(graph: Graph, uses: ForwardUses, stages: Stages, *, memory: bool = True) -> SingleRecompute:
    """Write the program of :mod:`solvers.programs.ilp` for all budgets (see ``set_budget``)."""
    program = Program()
    scale = SECONDS / max(graph.base_seconds, 1e-30)
    keep = np.full(len(graph.values), -1, dtype=np.int64)
    free = listed(ValueId, np.flatnonzero(stages.free))
    for v in free:
        keep[v] = program.variable(integer=True)
    rerun: list[list[Variable]] = []
    for i, times in numbered(BaseOp, stages.times):
        cost = float(graph.seconds[graph.rerun(i)]) * scale
        rerun.append([program.variable(cost if k == len(times) - 1 else 0.0) for k in range(len(times))])
        for earlier, later in zip(rerun[-1], rerun[-1][1:], strict=False):
            program.row({later: 1.0, earlier: -1.0}, low=0.0)
    producer, direct = listed(BaseOp, graph.producer), listed(BaseOp, stages.direct)
    kept = listed(Variable, keep)
    for v in free:
        i = producer[v]
        times = stages.times[i]
        if direct[v] >= 0:
            program.row({rerun[i][times.index(direct[v])]: 1.0, kept[v]: 1.0}, low=1.0)
        for reader in stages.readers[v]:
            if stages.segment[reader] != stages.segment[i]:
                if rerun[reader]:
                    program.row({kept[v]: 1.0, rerun[reader][-1]: -1.0}, low=0.0)
                continue
            for time, variable in zip(stages.times[reader], rerun[reader], strict=True):
                own = rerun[i][times.index(time)]
                program.row({own: 1.0, kept[v]: 1.0, variable: -1.0}, low=0.0)
    fixed = fixed_bytes(graph, uses, stages.free, stages.end)
    moments = find_moments(graph, stages, fixed)
    unit = max(1.0, float(graph.bytes.sum()) / 1e4)
    model = SingleRecompute(
        program, keep, moments, ProgramRow(0), fixed[moments], np.zeros(len(moments)), unit
    )
    if memory:
        write_memory(graph, uses, stages, model, rerun)
    return model


def fixed_bytes(graph: Graph, uses: ForwardUses, free: ValueMask, end: BaseOpPerValue) -> PerBaseOp:
    """For each base operation the bytes alive whatever is decided about the ``free`` values, others
    living up to ``end`` at least, its workspace included."""
    last = np.where(free, last_forward_use(graph), np.maximum(uses.last_any, end))
    values, until = graph.held_table
    np.maximum.at(last, values, until)
    exists = (graph.producer >= 0) & ~(graph.on_demand & (uses.last_any == graph.producer))
    change = np.zeros(graph.base_length + 1, dtype=np.int64)
    np.add.at(change, graph.producer[exists], graph.bytes[exists])
    np.subtract.at(change, last[exists] + 1, graph.bytes[exists])
    fixed: PerBaseOp = np.cumsum(change[:-1]).astype(np.float64)
    if graph.in_flight is not None and graph.forward_length < graph.base_length:
        across = exists & (graph.producer < graph.forward_length) & (last >= graph.forward_length)
        held = int(graph.bytes[across].sum())
        sent = sum(int(graph.bytes[v]) for v in graph.in_flight.sent if not across[v])
        fixed += graph.in_flight.beside(held, graph.base_schedule, graph.forward_length, sent)
    fixed += graph.workspace_bytes[: graph.base_length]
    return fixed


def find_moments(graph: Graph, stages: Stages, fixed: PerBaseOp) -> BaseOps:
    """The base operations that get a memory row: every stage, and the highest between two stages."""
    most = fixed.copy()
    change = np.zeros(graph.base_length + 1)
    values = np.flatnonzero(stages.free)
    np.add.at(change, graph.producer[values], graph.bytes[values])
    np.subtract.at(change, np.maximum(graph.producer[values], stages.end[values]) + 1, graph.bytes[values])
    most += np.cumsum(change[:-1])
    edges = sorted({t for times in stages.times for t in times} | {graph.forward_length})
    forward = np.flatnonzero(np.diff(stages.segment, append=-1)).tolist()
    chosen: set[int] = set()
    highest = [
        begin + int(most[begin:end].argmax())
        for begin, end in zip([0, *(i + 1 for i in forward)], [i + 1 for i in forward], strict=False)
    ]
    chosen.update(sorted(highest, key=lambda i: -most[i])[:MOST_FORWARD])
    for begin, end in zip(edges, [*edges[1:], graph.base_length], strict=True):
        if begin < end:
            chosen |= {begin, begin + int(most[begin:end].argmax()), begin + int(fixed[begin:end].argmax())}
    return np.array(sorted(chosen), dtype=np.int64)


def write_memory(
    graph: Graph,
    uses: ForwardUses,
    stages: Stages,
    model: SingleRecompute,
    rerun: Per[BaseOp, list[Variable]],
) -> None:
    """Write the memory rows. What a segment keeps enters a row as one variable, less what is no
    longer read; segments that backward has not come to enter as one variable all together."""
    program = model.program
    size = (graph.bytes / model.unit).tolist()
    last_use = last_forward_use(graph)
    lives = list(segment_lives(graph, uses, stages, last_use))
    keep, last_backward = listed(Variable, model.keep), listed(BaseOp, uses.last_backward)
    own: list[Variable] = []
    prefix: list[Variable] = []
    for life in lives:
        own.append(program.variable(high=np.inf))
        program.row({**{keep[v]: size[v] for v in life.members}, own[-1]: -1.0}, high=0.0)
        chain = {own[-1]: 1.0, prefix[-1]: 1.0} if prefix else {own[-1]: 1.0}
        prefix.append(program.variable(high=np.inf))
        program.row({**chain, prefix[-1]: -1.0}, high=0.0)
    model.first_row = ProgramRow(len(program.row_low))
    entries = count_entries(lives, model.moments)
    if entries > MOST_ENTRIES:
        stretches = np.array_split(
            np.arange(len(model.moments)), max(16, len(model.moments) * MOST_ENTRIES // entries)
        )
        highest = [int(s[model.fixed[s].argmax()]) for s in stretches if len(s)]
        model.moments, model.fixed = model.moments[highest], model.fixed[highest]
        model.correction = np.zeros(len(highest))
    for moment in listed(BaseOp, model.moments):
        whole = 0
        while whole < len(lives) and lives[whole].settled <= moment <= lives[whole].untouched:
            whole += 1
        row: dict[Variable, float] = {prefix[whole - 1]: 1.0} if whole else {}
        for g, life in enumerate(lives[whole:], whole):
            if moment <= life.begin or moment > life.finish:
                continue
            over = bisect_left(life.ends, moment)
            if life.settled <= moment and 2 * over < len(life.members):
                row[own[g]] = 1.0
                row.update((keep[v], -size[v]) for v in life.members[:over])
            else:
                alive = life.members[over:]
                row.update((keep[v], size[v]) for v in alive if last_use[v] < moment)
            for i, values in life.reruns[: bisect_right(life.firsts, moment)]:
                read = [size[v] for v in values if moment <= last_backward[v]]
                if read:
                    variable = rerun[i][bisect_right(stages.times[i], moment) - 1]
                    row[variable] = row.get(variable, 0.0) + sum(read)
        program.row(row)


def count_entries(lives: "list[_Life]", moments: BaseOps) -> int:
    """About how many coefficients the memory rows of these moments have."""
    total = 0
    for life in lives:
        inside = (life.begin < moments) & (moments <= life.finish)
        whole = (life.settled <= moments) & (moments <= life.untouched)
        total += int((inside & ~whole).sum()) * len(life.members)
    return total


@dataclass(frozen=True)
class _Life:
    """When the free values of a segment matter.

    Attributes:
        begin: They matter after this base operation.
        settled: From here on the program decides about all of them.
        untouched: Up to here all of them that are kept are alive.
        finish: After this base operation they no longer matter.
        members: The free values, those whose last possible use comes first in front.
        ends: The last possible use of each of them.
        reruns: The operations that may be re-run, by when that may first be caused, and what each makes of
            ``members``.
        firsts: When that is.
    """

    begin: BaseOp
    settled: BaseOp
    untouched: BaseOp
    finish: BaseOp
    members: list[ValueId]
    ends: list[BaseOp]
    reruns: list[tuple[BaseOp, list[ValueId]]]
    firsts: list[BaseOp]


def segment_lives(
    graph: Graph, uses: ForwardUses, stages: Stages, last_use: BaseOpPerValue
) -> Iterator[_Life]:
    """One for every segment that has free values, in forward order."""
    producer, segment = listed(BaseOp, graph.producer), listed(Segment, stages.segment)
    end, last_backward = listed(BaseOp, stages.end), listed(BaseOp, uses.last_backward)
    last_uses = listed(BaseOp, last_use)
    groups: dict[Segment, list[ValueId]] = {}
    for v in listed(ValueId, np.flatnonzero(stages.free)):
        groups.setdefault(segment[producer[v]], []).append(v)
    for g in sorted(groups):
        members = sorted(groups[g], key=end.__getitem__)
        ends = [end[v] for v in members]
        made: dict[BaseOp, list[ValueId]] = {}
        for v in members:
            made.setdefault(producer[v], []).append(v)
        reruns = sorted(
            ((i, m) for i, m in made.items() if stages.times[i]), key=lambda r: stages.times[r[0]][0]
        )
        firsts = [stages.times[i][0] for i, _ in reruns]
        last = max([*ends, *(last_backward[v] for v in members)])
        begin = min(last_uses[v] for v in members)
        settled = base_op(max(last_uses[v] for v in members) + 1)
        untouched = base_op(min([ends[0], *(f - 1 for f in firsts[:1])]))
        yield _Life(begin, settled, untouched, last, members, ends, reruns, firsts)
