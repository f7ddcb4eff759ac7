"""Checkmate's integer program: Jain et al., "Checkmate: Breaking the memory wall with optimal tensor
rematerialization", MLSys 2020 (arXiv 1910.02653), section 4, in the form of this package's model.

Elsewhere: the T x T rematerialisation ILP.

Time is a row of *slots*: the forward operations; then, for every backward operation, one slot for the
re-run of each forward operation in captured order, and one for the operation itself.

    R[j] in {0, 1}   the re-run of slot j takes place (1 for captured operations).
    A[v, j] in [0, 1] value v is alive during slot j.

    A[v, j] <= A[v, j-1] + R[j] if slot j recomputes v, else A[v, j] <= A[v, j-1]
    A[v, j] >= R[j]  for every v that slot j reads or writes
    sum of bytes(v) A[v, j] + workspace(j) R[j] <= budget   for every slot

:func:`solvers.reference.programs.exact_model` is this specification in code, and the test of the arrays here.

Minimise the sum of seconds(j) R[j]. With R integral A may be fractional: alive is what is used. Frees
need no variables of their own, since A may fall in any slot.

Optimal among schedules that re-run an operation at most once before each backward operation, in
captured order. The program has (forward x backward) binaries and their product with the values in
rows: for graphs of up to about two dozen forward operations, as the oracle of the tests.
"""

from dataclasses import dataclass, replace

import numpy as np

from solvers.least import floor_bytes
from solvers.local.polish import prune
from solvers.milp import Outcome, Program
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.indices import BaseOp, Per, RowId, SlotId, ValueId, Variable, indices, numbered
from solvers.model.solution import Solution, Status
from solvers.model.solver import solver

NAME = "exact"
MOST_BINARIES = 4_000
"""Larger programs are not written: the answer is that of the portfolio's quick solvers then."""
SECONDS = 1000.0


@solver(NAME, seconds=60.0)
def solve(search: Search) -> Solution | None:
    """Solve a small graph, of up to about two dozen forward operations, to optimality.

    The optimum has its own seconds as bound; when time runs out the answer is the best found. In graphs
    that are too large nothing is recomputed. The least peak is found by bisection.
    """
    graph, budget = search.graph, search.budget
    everything = search.try_everything()
    if search.fits(everything):
        met = everything.seconds <= graph.base_seconds
        return search.solution(bound_seconds=graph.base_seconds, optimal=met)
    if count_slots(graph) - graph.base_length > MOST_BINARIES:
        return None
    slots = find_slots(graph)
    if budget is None:
        return least_peak(search, slots, everything.peak_bytes)
    proven = answer(search, slots, budget)
    solution = search.solution()
    if not solution.feasible:
        return least_peak(search, slots, solution.peak_bytes)
    if proven is None:
        return solution
    bound = min(max(proven, graph.base_seconds), solution.seconds)
    met = solution.seconds <= bound * (1 + 1e-6)
    return replace(solution, bound_seconds=bound, status=Status.OPTIMAL if met else Status.FEASIBLE)


def least_peak(search: Search, slots: "list[Slot]", high: int, *, seconds: float = float("inf")) -> Solution:
    """Bisect for the least budget that has an answer, for so many wall seconds at most."""
    low, end = floor_bytes(search.graph) - 1, search.elapsed + seconds
    while high - low > max(1, high // 200) and not search.out_of_time() and search.elapsed < end:
        middle = (low + high) // 2
        answer(search, slots, middle, seconds=end - search.elapsed)
        assert search.least is not None
        high = min(high, search.least.peak_bytes)
        if high > middle:
            low = middle
    return search.solution()


@dataclass(frozen=True)
class Slot:
    """A place in time: row ``row`` of the graph may run (``optional``) or does."""

    row: RowId
    optional: bool


def find_slots(graph: Graph) -> list[Slot]:
    """All slots: forward, then before each backward operation the re-runs of its region."""
    slots = [Slot(i, False) for i in graph.forward_ops]
    again = _again(graph)
    for t in graph.backward_ops:
        slots += [Slot(graph.rerun(i), True) for i in again if graph.ops[i].region == graph.ops[t].region]
        slots.append(Slot(t, False))
    return slots


def count_slots(graph: Graph) -> int:
    """How many slots there are at most, without making them."""
    return graph.base_length + len(_again(graph)) * (graph.base_length - graph.forward_length)


def _again(graph: Graph) -> list[BaseOp]:
    """The forward operations that may be re-run."""
    return [i for i in graph.forward_ops if any(graph.recompute_row[v] >= 0 for v in graph.ops[i].outputs)]


def answer(search: Search, slots: list[Slot], budget: int, *, seconds: float = float("inf")) -> float | None:
    """Solve the program for one budget, for so many wall seconds at most, and offer its schedule; the proven
    bound in seconds."""
    graph = search.graph
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
        if graph.workspace_bytes[s.row]:
            memory[j][run[j]] = float(graph.workspace_bytes[s.row]) / unit
    last_base = {s.row: j for j, s in numbered(SlotId, slots) if not s.optional}
    for v, value in numbered(ValueId, graph.values):
        if graph.producer[v] >= 0:
            _write_value(
                graph,
                search.constraints,
                program,
                slots,
                run,
                memory,
                v,
                value.bytes / unit,
                last_base,
            )
    for terms in memory:
        program.row(terms, high=budget / unit)
    left = seconds if search.time_limit is None else min(seconds, search.time_limit - search.elapsed)
    result = program.solve(time_limit=None if np.isinf(left) else max(0.1, left), gap=1e-6)
    if result.values is None:
        return None
    schedule = [s.row for j, s in enumerate(slots) if result.values[run[j]] > 0.5]
    search.try_schedule(prune(graph, np.array(schedule, dtype=np.int64)))
    if result.outcome is Outcome.UNKNOWN or not np.isfinite(result.bound):
        return None
    return graph.base_seconds + (result.bound - 1e-6 * len(slots)) / scale


def _write_value(
    graph: Graph,
    constraints: Constraints,
    program: Program,
    slots: Per[SlotId, Slot],
    run: Per[SlotId, Variable],
    memory: Per[SlotId, dict[Variable, float]],
    v: ValueId,
    size: float,
    last_base: dict[RowId, SlotId],
) -> None:
    """The life of one value: its A variables, their rows, their place in the memory rows."""
    inputs, outputs = graph.walk_table.inputs, graph.walk_table.outputs
    begin = last_base[RowId(int(graph.producer[v]))]
    later = indices(SlotId, len(slots), begin)
    touching = [j for j in later if v in inputs[slots[j].row] or v in outputs[slots[j].row]]
    end = touching[-1]
    until = graph.values[v].held_until
    held = begin if until is None else max(begin, last_base[until])
    end = max(end, held)
    on_demand = graph.values[v].on_demand
    first_read = next((j for j in touching if j >= graph.forward_length and not slots[j].optional), end)
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
        row = slots[j].row
        writes, reads = v in outputs[row], v in inputs[row]
        if previous is not None:
            terms = {alive: 1.0, previous: -1.0}
            if j == banned_from:
                terms = {alive: 1.0}
            if writes:
                terms[run[j]] = -1.0
            program.row(terms, high=0.0)
        if reads or (writes and not (on_demand and j == begin)):
            program.row({alive: 1.0, run[j]: -1.0}, low=0.0)
        previous = alive
