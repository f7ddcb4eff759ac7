"""The least peak: a lower bound of it, and the least that a solver reaches.

:func:`least` asks any solver twice. At a budget of 0 it answers with the least peak that it finds (a solver
that has no answer then is bisected); at that peak it answers with the fastest schedule. Where a limit on the
step's seconds is given, the budget is bisected between the two ends: with more memory a good solver's
schedules are never slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from solvers.model.arrays import Schedule
from solvers.model.constraints import Constraints
from solvers.model.cut_points import forward_uses, last_forward_use
from solvers.model.graph import Graph
from solvers.model.schedule import simulate
from solvers.model.solution import Progress, Solution, Status

NEAR = 0.002
"""Bisection ends when the largest budget known to be too small is this near to the smallest that is enough,
relative to that."""


def floor_bytes(graph: Graph) -> int:
    """A dynamic peak that no schedule undercuts.

    While an operation of the step runs, these are alive in any schedule: its inputs and outputs, its
    workspace, values that the outside world holds, and values that are read later and that nothing can
    recompute.
    """
    if not graph.base_length:
        return 0
    uses = forward_uses(graph)
    recomputable = graph.recompute_row >= 0
    last = np.where(recomputable, last_forward_use(graph), uses.last_any)
    values, until = graph.held_table
    np.maximum.at(last, values, until)
    allocated = (graph.producer >= 0) & ~graph.on_demand
    last = np.maximum(last, graph.producer)
    change = np.zeros(graph.base_length + 1, dtype=np.int64)
    np.add.at(change, graph.producer[allocated], graph.bytes[allocated])
    np.subtract.at(change, last[allocated] + 1, graph.bytes[allocated])
    floor = np.cumsum(change[:-1]) + graph.workspace_bytes[: graph.base_length]
    size, last_step = np.where(allocated, graph.bytes, 0).tolist(), last.tolist()
    inputs = graph.walk_table.inputs[: graph.base_length]
    floor += [sum([size[v] for v in read if last_step[v] < row]) for row, read in enumerate(inputs)]
    return int(floor.max())


Attempt = Callable[[int, float, Sequence[Schedule]], Solution]
"""Solves for a budget, within so many wall seconds, with schedules that are known."""


def least(
    solve: Callable[..., Solution],
    graph: Graph,
    *,
    most_seconds: float = float("inf"),
    time_limit: float | None = None,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
) -> Solution:
    """The least peak that a solver reaches, by the fastest schedule that it finds of that peak.

    Args:
        solve: The solver.
        graph: The problem.
        most_seconds: Most seconds of the step; schedules that take longer do not count.
        time_limit: Wall seconds.
        progress: Called with the present action and the fraction done.
        constraints: Values that are always kept or always recomputed.

    Returns:
        The schedule; infeasible where all schedules that the solver finds take longer than ``most_seconds``.
    """
    limit = 60.0 if time_limit is None else time_limit
    unplanned = simulate(graph, graph.base_schedule).peak_bytes

    def attempt(budget: int | None, seconds: float, _known: Sequence[Schedule] = ()) -> Solution:
        return solve(graph, budget, time_limit=seconds, progress=progress, constraints=constraints)

    begin = perf_counter()
    best = attempt(0, limit / 2)
    if best.peak_bytes >= unplanned:  # a solver that gives no nearest answer where the budget is not met
        best = attempt(None, limit / 8)
        best = bisect(attempt, floor_bytes(graph) - 1, best, float("inf"), limit / 8)
    best = replace(best, status=Status.FEASIBLE, bound_seconds=None)
    faster = attempt(best.peak_bytes, max(0.0, limit - (perf_counter() - begin)))
    if faster.feasible and faster.peak_bytes <= best.peak_bytes:
        best = faster
    if best.seconds > most_seconds:
        high = attempt(unplanned, limit / 4)
        if not high.feasible or high.seconds > most_seconds:
            return high.infeasible()
        best = bisect(attempt, best.peak_bytes, high, most_seconds, limit / 2)
    return replace(best, solve_seconds=perf_counter() - begin)


def bisect(
    attempt: Attempt,
    low: int,
    best: Solution,
    most_seconds: float,
    time_limit: float,
    *,
    most_failures: float = float("inf"),
) -> Solution:
    """The schedule of least peak that takes at most ``most_seconds``.

    Args:
        attempt: Solves for a budget.
        low: Bytes that are not enough.
        best: A schedule that is fast enough.
        most_seconds: The most seconds of the step.
        time_limit: Wall seconds.
        most_failures: The number of attempts in a row that find nothing, after which no more are made.
    """
    begin, failures = perf_counter(), 0
    while best.peak_bytes - low > max(1, NEAR * best.peak_bytes):
        left = time_limit - (perf_counter() - begin)
        if left <= 0 or failures >= most_failures:
            break
        middle = (low + best.peak_bytes) // 2
        found = attempt(middle, left / 3, [best.schedule])
        if found.feasible and found.seconds <= most_seconds:
            best, failures = found, 0
        else:
            low, failures = middle, failures + 1
    return best
