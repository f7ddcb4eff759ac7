"""A schedule whose step fits a budget on a GPU, reserved bytes included.

Solvers bound the bytes that a schedule allocates. The bytes that the caching allocator reserves for it are
known only once there is a schedule, and do not fall steadily with those that are allocated. So the solvers'
bound, the *allowance*, is lowered by the bytes that a schedule is over the budget, until one fits or there is
none for so little. Then gaps between allowances that fit and those that do not are halved.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from solvers.model.arrays import Schedule
from solvers.model.solution import Solution, Status

MOST_ATTEMPTS = 8
"""The most schedules that are judged. All but the first are solved for."""
_LEAST_STEP = 1 / 400
"""The share of its peak by which the next allowance is lower at least, if a schedule is over by few bytes."""
_NEAR = 1 / 50
"""The share of a peak below which a gap is not halved any more. A gap as large as the peak is halved six
times until then, which the attempts allow."""
_ALIKE = 1 / 2000
"""The share of its seconds by which a schedule must be faster; else the one of fewer bytes is the better. No
measurement of a step is as exact."""


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
    """Return the solution if its whole step is within the budget; else look for another one.

    Args:
        solution: A solver's solution for the dynamic peak that the budget leaves if no more bytes are
            reserved than allocated.
        budget_bytes: The budget of the whole step.
        total_bytes: Predicts the bytes of a schedule's whole step.
        solve: Finds a solution for a dynamic peak in bytes, within wall seconds.
        time_limit: Wall seconds for all attempts. If none fits, the least peak is still tried afterwards.
        too_slow: Whether a solution is too slow to be of use. If it does not fit either, the search ends: one
            for less memory is no faster.
        enough: Whether a solution that fits is good enough to end the search.

    Returns:
        The fastest feasible solution whose step fits, and of nearly equal ones that of the fewest bytes. If
        none fits, the one of the fewest bytes, as infeasible, or the first that is too slow.
    """
    end = time.perf_counter() + time_limit
    if solution.feasible and total_bytes(solution.schedule) <= budget_bytes:
        return solution
    bound = solution.bound_seconds  # of the largest allowance: it bounds all schedules that could fit
    fitting: Solution | None = None
    fitting_over = 0  # its bytes over the budget, which are negative
    # Allowances up to here need not be tried: one at least as large fits, or no schedule takes as little.
    lowest: int | None = None
    allowance = solution.peak_bytes
    failing = list[tuple[int, int]]()  # peaks, and the allowances for which they were found
    least = solution, total_bytes(solution.schedule)  # the solution of the fewest bytes, and these
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
            return solution.infeasible()
        if not solution.feasible:
            lowest = max(lowest or 0, solution.peak_bytes)
        elif over <= 0:
            lowest = max(lowest or 0, allowance)
        else:
            failing.append((solution.peak_bytes, allowance))
        if lowest is None:
            allowance = max(0, solution.peak_bytes - max(over, int(solution.peak_bytes * _LEAST_STEP)))
        elif (between := _between(lowest, failing)) is not None:
            allowance = between
        else:
            break
        if attempt == MOST_ATTEMPTS - 1 or time.perf_counter() > end:
            break
        # Half of the time that is left, as a solver that used all of it would leave none for another attempt.
        solution = solve(allowance, max((end - time.perf_counter()) / 2, 1.0))
    if fitting is None and lowest is None:
        solution = solve(0, max(end - time.perf_counter(), time_limit / 8, 1.0))
        total = total_bytes(solution.schedule)
        if total <= budget_bytes:
            fitting = replace(solution, status=Status.FEASIBLE, bound_seconds=bound)
        elif total < least[1]:
            least = solution, total
    return fitting or least[0].infeasible()


def _is_better(one: Solution, one_over: int, other: Solution, other_over: int) -> bool:
    """Whether one of two that fit is faster; if they are nearly equal, whether it is less over the budget."""
    if abs(one.seconds - other.seconds) <= _ALIKE * other.seconds:
        return one_over < other_over
    return one.seconds < other.seconds


def _between(lowest: int, failing: Sequence[tuple[int, int]]) -> int | None:
    """The middle of the lowest gap wider than `_NEAR` in which a solver may find a schedule not yet seen.

    Args:
        lowest: The allowance above which it is looked for.
        failing: The peak of each schedule that does not fit, and the allowance that it was found for. Between
            these two it would be found again.
    """
    known = lowest
    for peak, allowance in sorted(failing):
        if peak - known > peak * _NEAR:
            return (known + peak) // 2
        known = max(known, allowance)
    return None
