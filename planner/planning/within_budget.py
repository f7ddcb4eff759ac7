"""A schedule whose step fits a budget on a GPU, reserved bytes included.

Solvers bound the bytes that a schedule allocates; what the caching allocator reserves for them is known of a
schedule that is there. So the allowance is lowered by what a schedule is over, until one fits.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from solvers.model.arrays import Schedule
from solvers.model.solution import Solution, Status

MOST_ATTEMPTS = 8
_LEAST_STEP = 1 / 400
"""Of the allowance; by less it is not lowered."""


def within_budget(
    solution: Solution,
    budget_bytes: int,
    total_bytes: Callable[[Schedule], int],
    solve: Callable[[int, float], Solution],
    *,
    time_limit: float,
    too_slow: Callable[[Solution], bool] = lambda solution: False,
) -> Solution:
    """The solution, or another one where its whole step is over the budget.

    Args:
        solution: What a solver found for the dynamic peak that the budget leaves if no more is reserved than
            is allocated.
        budget_bytes: For the whole step.
        total_bytes: What the whole step of a schedule takes.
        solve: The solution for a dynamic peak, within so many seconds.
        time_limit: Wall seconds for all that is tried; the least peak there is is tried in any case.
        too_slow: Whether a solution takes more time than is of use: for less memory it takes no less.

    Returns:
        A feasible solution whose step fits; else an infeasible one with the least peak that was found, or the
        first that is too slow.
    """
    end = time.perf_counter() + time_limit
    for _ in range(MOST_ATTEMPTS):
        if solution.feasible and too_slow(solution):
            return solution
        over = total_bytes(solution.schedule) - budget_bytes
        if over <= 0:
            return solution if solution.feasible else _fitting(solution)
        if not solution.feasible or time.perf_counter() > end:
            break
        room = solution.peak_bytes - max(over, int(solution.peak_bytes * _LEAST_STEP))
        solution = solve(max(room, 0), max(end - time.perf_counter(), 1.0))
    if solution.feasible:
        solution = solve(0, max(end - time.perf_counter(), 1.0))
    return _fitting(solution) if total_bytes(solution.schedule) <= budget_bytes else solution.infeasible()


def _fitting(solution: Solution) -> Solution:
    """It has a larger peak than was allowed for what would be reserved, and fits all the same."""
    return replace(solution, status=Status.FEASIBLE)
