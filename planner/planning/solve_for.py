"""Solving for a budget as it was asked for: bytes, the least, or the least at some extra time."""

from planner.errors import BudgetError
from planner.planfile.budget import Budget
from solvers import portfolio
from solvers.effort import Effort
from solvers.least import least
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.solution import Progress, Solution
from solvers.registry import SOLVERS


class TooSlow(BudgetError):
    """All schedules that were found take longer than a budget as "min@33%" allows.

    Attributes:
        solution: The fastest of them, as infeasible.
    """

    def __init__(self, text: str, solution: Solution) -> None:
        super().__init__(text)
        self.solution = solution


def too_slow(budget: Budget, solution: Solution, graph: Graph) -> TooSlow:
    """The error about a budget that allows less extra time than a solution takes."""
    extra = solution.seconds / graph.base_seconds - 1 if graph.base_seconds else 0.0
    return TooSlow(
        f"budget {budget.text}: the fastest schedule that solver {solution.solver} finds takes "
        f"{extra:.1%} extra time, with what it was asked to recompute; allow at least that",
        solution,
    )


def solve_for(
    graph: Graph,
    budget: Budget,
    room: int | None,
    solver: str,
    *,
    time_limit: float,
    effort: Effort,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
    rival: float = float("inf"),
    minimum: bool = True,
) -> Solution:
    """The schedule for a budget by a solver.

    Args:
        graph: The problem.
        budget: What was asked for.
        room: The dynamic peak that it allows; None for the least.
        solver: Its name.
        time_limit: Wall seconds.
        effort: How long the portfolio searches.
        progress: Called with what is being done, and how much of it is done.
        constraints: Values that are always kept or always recomputed.
        rival: Seconds of an answer to another form of the same step, as for :func:`solvers.portfolio.solve`.
        minimum: Whether the answer where nothing fits must be the least peak, as there; other solvers' is.

    Returns:
        The solution. Where nothing fits it is infeasible, with the least peak that the solver reaches, which
        is that of "min".

    Raises:
        BudgetError: Asked for was the least at some extra time, and all that the solver finds takes more.
    """
    if room is not None and solver == portfolio.NAME:
        return portfolio.solve(
            graph,
            room,
            time_limit=time_limit,
            progress=progress,
            constraints=constraints,
            effort=effort,
            rival=rival,
            minimum=minimum,
        )
    if room is not None:
        solution = SOLVERS[solver](
            graph, room, time_limit=time_limit, progress=progress, constraints=constraints
        )
        if solution.feasible:
            return solution
        lowest = least(SOLVERS[solver], graph, time_limit=time_limit, constraints=constraints)
        return lowest if lowest.peak_bytes <= room else lowest.infeasible()
    most_seconds = float("inf")
    if budget.max_overhead is not None:
        most_seconds = graph.base_seconds * (1 + budget.max_overhead)
    if solver == portfolio.NAME:
        solution = portfolio.solve(
            graph,
            None,
            time_limit=time_limit,
            progress=progress,
            constraints=constraints,
            most_seconds=most_seconds,
            effort=effort,
        )
    else:
        solution = least(
            SOLVERS[solver],
            graph,
            most_seconds=most_seconds,
            time_limit=time_limit,
            progress=progress,
            constraints=constraints,
        )
    if not solution.feasible:
        raise too_slow(budget, solution, graph)
    return solution
