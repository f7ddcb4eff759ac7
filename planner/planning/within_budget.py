"""A schedule whose step fits a budget on a GPU, reserved bytes included.

Solvers bound the bytes that a schedule allocates; what the caching allocator reserves for them is known of a
schedule that is there, and does not fall steadily with what is allocated. So the allowance is lowered by what
a schedule is over, until one fits or there is no schedule with so little; then gaps between allowances that
fit and that do not are halved.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from solvers.model.arrays import Schedule
from solvers.model.solution import Solution, Status

MOST_ATTEMPTS = 8
_LEAST_STEP = 1 / 400
"""Of the allowance; by less it is not lowered."""
_NEAR = 1 / 50
"""Of the allowance: what fits is not looked for any nearer to what does not."""


_ALIKE = 1 / 2000
"""Of the seconds: by less, of two schedules that fit, the one that takes fewer bytes is the better."""


def within_budget(
    solution: Solution,
    budget_bytes: int,
    total_bytes: Callable[[Schedule], int],
    solve: Callable[[int, float], Solution],
    *,
    time_limit: float,
    too_slow: Callable[[Solution], bool] = lambda solution: False,
    enough: Callable[[Solution], bool] = lambda solution: False,
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
        enough: Whether no faster one is looked for than a solution that fits.

    Returns:
        The fastest feasible solution that was found whose step fits, of nearly equal ones the one that takes
        least; else the one that takes least of all, as infeasible, or the first that is too slow.
    """
    end = time.perf_counter() + time_limit
    if solution.feasible and total_bytes(solution.schedule) <= budget_bytes:
        return solution
    bound = solution.bound_seconds  # of all that the budget could allow; a smaller allowance's says less
    fitting: Solution | None = None
    fitting_over = 0
    lowest: int | None = None  # the largest allowance of which something fits, or the least there is
    room = solution.peak_bytes
    failing = list[tuple[int, int]]()  # peaks, and the allowances for which they were found
    least = solution, total_bytes(solution.schedule)
    for attempt in range(MOST_ATTEMPTS):
        over = total_bytes(solution.schedule) - budget_bytes
        if over + budget_bytes < least[1]:
            least = solution, over + budget_bytes
        if over <= 0:
            if fitting is None or _is_better(solution, over, fitting, fitting_over):
                fitting_over = over
                fitting = replace(solution, status=Status.FEASIBLE, bound_seconds=bound)
            if enough(fitting):
                break
        elif fitting is None and solution.feasible and too_slow(solution):
            return solution
        if not solution.feasible:
            lowest = max(lowest or 0, solution.peak_bytes)
        elif over <= 0:
            lowest = max(lowest or 0, room)
        else:
            failing.append((solution.peak_bytes, room))
        if lowest is None:
            room = max(0, solution.peak_bytes - max(over, int(solution.peak_bytes * _LEAST_STEP)))
        elif (between := _between(lowest, failing)) is not None:
            room = between
        else:
            break
        if attempt == MOST_ATTEMPTS - 1 or time.perf_counter() > end:
            break
        # Half of what is left: one that took all would leave nothing between it and the least peak.
        solution = solve(room, max((end - time.perf_counter()) / 2, 1.0))
    if fitting is None and lowest is None:
        solution = solve(0, max(end - time.perf_counter(), time_limit / 8, 1.0))
        total = total_bytes(solution.schedule)
        if total <= budget_bytes:
            fitting = replace(solution, status=Status.FEASIBLE, bound_seconds=bound)
        elif total < least[1]:
            least = solution, total
    return fitting or least[0].infeasible()


def _is_better(one: Solution, over: int, other: Solution, other_over: int) -> bool:
    """Whether one of two that fit is faster; of nearly equal ones, whether it takes less."""
    if abs(one.seconds - other.seconds) <= _ALIKE * other.seconds:
        return over < other_over
    return one.seconds < other.seconds


def _between(lowest: int, failing: Sequence[tuple[int, int]]) -> int | None:
    """The middle of the lowest wide gap between allowances of which something is known."""
    known = lowest
    for peak, room in sorted(failing):
        if peak - known > peak * _NEAR:
            return (known + peak) // 2
        known = max(known, room)
    return None
