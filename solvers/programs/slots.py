"""An integer program over *slots*, places in time at which operations run or may run again.

:mod:`solvers.programs.exact_ilp` specifies the program and has a slot for every possible re-run;
:mod:`solvers.programs.neighbourhood` has only those of a part of the step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solvers.milp import Program
from solvers.model.arrays import Schedule
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.indices import Per, RowId, SlotId, ValueId, Variable, indices, numbered

SECONDS = 1000.0
"""The seconds of the step in the program: solvers have tolerances of their own."""
GAP = 1e-6
VARIABLES_A_STEP = 20
"""How many variables of a program are written in the time of one iteration of the simplex method."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in time.

    Attributes:
        row: The row of the graph that runs here; of several rows that run one after the other the last.
        optional: Whether it may run here; otherwise it does.
        reads, writes: The values that it reads and writes; those that are not among a program's do not count.
        beside: Bytes of values that are not among a program's, and of workspace where it is not ``row``'s.
        rows: All that run here, in order, where ``row`` is not all: none of them reads or writes a value of
            the program.
    """

    row: RowId
    optional: bool
    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    beside: int = 0
    rows: tuple[RowId, ...] = ()


def slot_of(graph: Graph, row: RowId, *, optional: bool = False, beside: int = 0) -> Slot:
    """The place of one row."""
    table = graph.walk_table
    return Slot(row, optional, table.inputs[row], table.outputs[row], beside)


@dataclass(frozen=True)
class Runs:
    """The answer to a program of slots.

    Attributes:
        schedule: The rows that run; None where no answer was found.
        work: Iterations of the simplex method, or as many as writing the program takes the time of, if that
            is more; one for each variable where the solver does not say. Unlike seconds, this is the same on
            every machine.
    """

    schedule: Schedule | None
    work: int


def best_runs(
    graph: Graph,
    slots: Per[SlotId, Slot],
    budget: int,
    constraints: Constraints,
    *,
    values: Sequence[ValueId] | None = None,
    seconds: float = float("inf"),
    nodes: int | None = None,
    gap: float = GAP,
    start: Sequence[bool] | None = None,
) -> Runs:
    """Choose the optional slots to use, so that the step takes least time.

    Args:
        graph: The problem.
        slots: In order. The slot that first computes a value comes before all slots that read it.
        budget: Bytes that no slot exceeds.
        constraints: Values that are always kept or always recomputed.
        values: The values whose lives the program decides; None for all of the graph.
        seconds: Wall seconds.
        nodes: Most nodes of the tree of the program.
        gap: The relative gap, of the seconds of optional slots, at which the program counts as solved.
        start: For each slot whether a known schedule uses it.
    """
    program = Program()
    scale = SECONDS / max(graph.base_seconds, 1e-30)
    unit = max(1.0, budget / 1e3)
    run = [
        program.variable(
            float(graph.seconds[s.row]) * scale + 1e-6 if s.optional else 0.0,
            low=0.0 if s.optional else 1.0,
            integer=s.optional,
        )
        for s in slots
    ]
    memory: list[dict[Variable, float]] = [{} for _ in slots]
    for j, s in enumerate(slots):
        if graph.workspace_bytes[s.row] and not s.rows:
            memory[j][run[j]] = float(graph.workspace_bytes[s.row]) / unit
    begin: dict[RowId, SlotId] = {}
    for j, s in numbered(SlotId, slots):
        if not s.optional:
            begin.setdefault(s.row, j)  # the first: behind it may be a re-run that is no question
    for v in graph.value_ids if values is None else values:
        if graph.producer[v] >= 0:
            _write_value(graph, constraints, program, slots, run, memory, v, unit, begin)
    for s, terms in zip(slots, memory, strict=True):
        program.row(terms, high=(budget - s.beside) / unit)
    known = None
    if start is not None:
        known = np.full(len(program.cost), np.nan)
        known[run] = np.asarray(start, dtype=np.float64)
    limit = None if np.isinf(seconds) else max(0.1, seconds)
    result = program.solve(time_limit=limit, gap=gap, start=known, nodes=nodes)
    iterations = len(program.cost) if result.iterations is None else result.iterations
    work = max(math.ceil(len(program.cost) / VARIABLES_A_STEP), iterations)
    if result.values is None:
        return Runs(None, work)
    used = [row for j, s in enumerate(slots) if result.values[run[j]] > 0.5 for row in (s.rows or (s.row,))]
    return Runs(np.array(used, dtype=np.int64), work)


def _write_value(
    graph: Graph,
    constraints: Constraints,
    program: Program,
    slots: Per[SlotId, Slot],
    run: Per[SlotId, Variable],
    memory: Per[SlotId, dict[Variable, float]],
    v: ValueId,
    unit: float,
    begins: dict[RowId, SlotId],
) -> None:
    """The life of one value: its A variables, their rows, their place in the memory rows."""
    size = graph.values[v].bytes / unit
    begin = begins[RowId(int(graph.producer[v]))]
    later = indices(SlotId, len(slots), begin)
    touching = [j for j in later if v in slots[j].reads or v in slots[j].writes]
    end = touching[-1]
    until = graph.values[v].held_until
    held = begin if until is None else max(begin, begins[until])
    end = max(end, held)
    on_demand = graph.values[v].on_demand
    base = range(graph.forward_length, graph.base_length)
    backward = (j for j in touching if not slots[j].optional and slots[j].row in base)
    first_read = next(backward, end)
    keep = constraints.keep is not None and bool(constraints.keep[v])
    banned_from: SlotId | None = None
    if constraints.recompute is not None and constraints.recompute[v] and graph.recompute_row[v] >= 0:
        own = graph.walk_table.recompute_region[v]
        banned_from = next(
            (j for j, s in numbered(SlotId, slots) if s.optional and graph.ops[s.row].region == own), None
        )
    previous: Variable | None = None
    for j in indices(SlotId, end + 1, begin):
        forced = not on_demand and (j == begin or j <= held or (keep and j <= first_read))
        alive = program.variable(low=float(forced))
        memory[j][alive] = memory[j].get(alive, 0.0) + size
        writes, reads = v in slots[j].writes, v in slots[j].reads
        if previous is not None:
            terms = {alive: 1.0, previous: -1.0}
            if j == banned_from:
                terms = {alive: 1.0}
            if writes and not keep:  # what is kept is not made again
                terms[run[j]] = -1.0
            program.row(terms, high=0.0)
        if reads or (writes and not (on_demand and j == begin)):
            program.row({alive: 1.0, run[j]: -1.0}, low=0.0)
        previous = alive
