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

from dataclasses import replace

from solvers.least import floor_bytes
from solvers.local.polish import prune
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.indices import BaseOp
from solvers.model.solution import Solution, Status
from solvers.model.solver import solver
from solvers.programs.lower_bound import lower_bound
from solvers.programs.slots import Slot, best_runs, slot_of

NAME = "exact"
MOST_BINARIES = 4_000
"""Larger programs are not written: the portfolio's quick solvers then answer."""


@solver(NAME, seconds=60.0)
def solve(search: Search) -> Solution | None:
    """Solve a small graph, of up to about two dozen forward operations, to optimality.

    The bound is that of :mod:`solvers.programs.lower_bound`: a schedule that re-runs operations in another
    order may be faster than the optimum of the program. When time runs out the answer is the best found. In
    graphs that are too large nothing is recomputed. The least peak is found by bisection.
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
    answer(search, slots, budget)
    solution = search.solution()
    if not solution.feasible:
        return least_peak(search, slots, solution.peak_bytes)
    bound = min(lower_bound(graph, budget, time_limit=search.seconds_left).seconds, solution.seconds)
    met = solution.seconds <= bound * (1 + 1e-6)
    return replace(solution, bound_seconds=bound, status=Status.OPTIMAL if met else Status.FEASIBLE)


def least_peak(search: Search, slots: "list[Slot]", high: int, *, seconds: float = float("inf")) -> Solution:
    """Bisect for the least budget that has an answer, in at most ``seconds`` wall seconds."""
    low, end = floor_bytes(search.graph) - 1, search.elapsed + seconds
    while high - low > max(1, high // 200) and not search.out_of_time() and search.elapsed < end:
        middle = (low + high) // 2
        answer(search, slots, middle, seconds=end - search.elapsed)
        assert search.least is not None
        high = min(high, search.least.peak_bytes)
        if high > middle:
            low = middle
    return search.solution()


def find_slots(graph: Graph) -> list[Slot]:
    """All slots: forward, then before each backward operation the re-runs of its region."""
    slots = [slot_of(graph, i) for i in graph.forward_ops]
    recomputable = _recomputable(graph)
    for t in graph.backward_ops:
        same_region = [i for i in recomputable if graph.ops[i].region == graph.ops[t].region]
        slots += [slot_of(graph, graph.rerun(i), optional=True) for i in same_region]
        slots.append(slot_of(graph, t))
    return slots


def count_slots(graph: Graph) -> int:
    """How many slots there are at most, without making them."""
    return graph.base_length + len(_recomputable(graph)) * (graph.base_length - graph.forward_length)


def _recomputable(graph: Graph) -> list[BaseOp]:
    """The forward operations that may be re-run."""
    return [i for i in graph.forward_ops if any(graph.recompute_row[v] >= 0 for v in graph.ops[i].outputs)]


def answer(search: Search, slots: list[Slot], budget: int, *, seconds: float = float("inf")) -> None:
    """Solve the program for one budget in at most ``seconds`` wall seconds, and offer its schedule."""
    graph = search.graph
    left = seconds if search.time_limit is None else min(seconds, search.time_limit - search.elapsed)
    runs = best_runs(graph, slots, budget, search.constraints, seconds=left)
    if runs.schedule is not None:
        search.try_schedule(prune(graph, runs.schedule))
