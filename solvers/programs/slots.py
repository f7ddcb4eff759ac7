"""An integer program over *slots*: an order of operations, of which some may be left out.

A slot is one place in that order. An operation of the step always runs there; a re-run is optional.
:mod:`solvers.programs.exact_ilp` states the program, and gives it a slot for every possible re-run.
:mod:`solvers.programs.neighbourhood` gives it slots for the re-runs of one part of the step.
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
"""The step takes so many seconds in the program: in its own it may be shorter than a solver's tolerance."""
GAP = 1e-6
"""The relative gap at which a program counts as solved, unless the caller gives another."""
VARIABLES_AN_ITERATION = 20
"""So many variables are written to a program in about the time of one iteration of the simplex method."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the order of the step.

    Attributes:
        row: The row of the graph that runs here; the last of ``merged``, if that is not empty.
        optional: Whether the program decides if the row runs here; else it runs.
        reads, writes: The values that it reads and writes. The program ignores those whose lives it does not
            decide.
        other_bytes: Bytes of the values whose lives the program does not decide. With ``merged``, the most
            of these and workspace at any of its rows.
        merged: Rows that run here one after the other, none of which reads or writes a value whose life the
            program decides; empty where ``row`` runs alone.
    """

    row: RowId
    optional: bool
    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    other_bytes: int = 0
    merged: tuple[RowId, ...] = ()


def slot_of(graph: Graph, row: RowId, *, optional: bool = False, other_bytes: int = 0) -> Slot:
    """The slot of one row."""
    table = graph.walk_table
    return Slot(row, optional, table.inputs[row], table.outputs[row], other_bytes)


@dataclass(frozen=True)
class ChosenRuns:
    """The answer to a program of slots.

    Attributes:
        schedule: The rows that run; None where no answer was found.
        work: What the answer took, in iterations of the simplex method, which unlike seconds are the same on
            every machine. A solver that does not count them is taken to need one for each variable. A program
            that takes longer to write than to solve counts by its variables, see
            ``VARIABLES_AN_ITERATION``.
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
) -> ChosenRuns:
    """Choose the optional slots whose rows run, so that the step takes least time.

    Args:
        graph: The problem.
        slots: The slots in order. The slot that first computes a value comes before all slots that read it.
        budget: Bytes that no slot exceeds.
        constraints: Values that are always kept or always recomputed.
        values: The values whose lives the program decides; None for all of the graph.
        seconds: The most wall seconds.
        nodes: The most nodes of branch and bound; None: any number.
        gap: The relative gap, of the seconds of optional slots, at which the program counts as solved.
        start: A known answer: for each slot whether it runs.
    """
    program = Program()
    scale = SECONDS / max(graph.base_seconds, 1e-30)  # a graph may take no seconds
    unit = max(1.0, budget / 1e3)  # the budget is 1,000 units in the program, for solvers' tolerances
    run = [
        program.variable(
            # A re-run that takes no seconds costs something too, so that none runs for nothing.
            float(graph.seconds[s.row]) * scale + 1e-6 if s.optional else 0.0,
            low=0.0 if s.optional else 1.0,
            integer=s.optional,
        )
        for s in slots
    ]
    memory: list[dict[Variable, float]] = [{} for _ in slots]
    for j, s in enumerate(slots):
        if graph.workspace_bytes[s.row] and not s.merged:
            memory[j][run[j]] = float(graph.workspace_bytes[s.row]) / unit
    slot_of_row: dict[RowId, SlotId] = {}
    for j, s in numbered(SlotId, slots):
        if not s.optional:
            slot_of_row.setdefault(s.row, j)  # its first slot: in a later one it runs again
    for v in graph.value_ids if values is None else values:
        if graph.producer[v] >= 0:
            _write_value(graph, constraints, program, slots, run, memory, v, unit, slot_of_row)
    for s, terms in zip(slots, memory, strict=True):
        program.row(terms, high=(budget - s.other_bytes) / unit)
    known = None
    if start is not None:
        known = np.full(len(program.cost), np.nan)
        known[run] = np.asarray(start, dtype=np.float64)
    limit = None if np.isinf(seconds) else max(0.1, seconds)
    result = program.solve(time_limit=limit, gap=gap, start=known, nodes=nodes)
    iterations = len(program.cost) if result.iterations is None else result.iterations
    work = max(math.ceil(len(program.cost) / VARIABLES_AN_ITERATION), iterations)
    if result.values is None:
        return ChosenRuns(None, work)
    runs = [s for j, s in enumerate(slots) if result.values[run[j]] > 0.5]
    rows = [row for s in runs for row in (s.merged or (s.row,))]
    return ChosenRuns(np.array(rows, dtype=np.int64), work)


def _write_value(
    graph: Graph,
    constraints: Constraints,
    program: Program,
    slots: Per[SlotId, Slot],
    run: Per[SlotId, Variable],
    memory: Per[SlotId, dict[Variable, float]],
    v: ValueId,
    unit: float,
    slot_of_row: dict[RowId, SlotId],
) -> None:
    """Write the life of one value: a variable ``alive`` for each slot, the constraints on it, its bytes.

    :mod:`solvers.programs.exact_ilp` calls the variable A.

    Args:
        graph, constraints, program, slots: As in :func:`best_runs`.
        run: For each slot the variable that says whether it runs.
        memory: For each slot the terms of its bytes; the value's are added.
        v: The value.
        unit: Bytes in one unit of the program.
        slot_of_row: The first slot of each row that is not optional.
    """
    size = graph.values[v].bytes / unit
    begin = slot_of_row[RowId(int(graph.producer[v]))]
    later = indices(SlotId, len(slots), begin)
    touching = [j for j in later if v in slots[j].reads or v in slots[j].writes]
    end = touching[-1]
    until = graph.values[v].held_until
    held = begin if until is None else max(begin, slot_of_row[until])
    end = max(end, held)
    on_demand = graph.values[v].on_demand
    backward_rows = range(graph.forward_length, graph.base_length)
    backward = (j for j in touching if not slots[j].optional and slots[j].row in backward_rows)
    first_read = next(backward, end)
    keep = constraints.keep is not None and bool(constraints.keep[v])
    dropped_at: SlotId | None = None  # where re-runs of its region begin, if it is always recomputed
    if constraints.recompute is not None and constraints.recompute[v] and graph.recompute_row[v] >= 0:
        own = graph.walk_table.recompute_region[v]
        dropped_at = next(
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
            if j == dropped_at:
                terms = {alive: 1.0}
            if writes and not keep:  # a kept value is computed once
                terms[run[j]] = -1.0
            program.row(terms, high=0.0)
        if reads or (writes and not (on_demand and j == begin)):
            program.row({alive: 1.0, run[j]: -1.0}, low=0.0)
        previous = alive
