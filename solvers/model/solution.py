"""What every solver returns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from solvers.model.arrays import Schedule
from solvers.model.graph import Graph
from solvers.model.schedule import simulate

Progress = Callable[[str, float], None]
"""Called with a short text and the fraction done (0 to 1)."""


class Status(StrEnum):
    """How good a solution is known to be."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True)
class Solution:
    """The answer of one solver to one budget.

    Attributes:
        solver: Name of the solver.
        status: Optimal, feasible, or infeasible (no schedule found within the budget).
        schedule: The schedule; when infeasible, the one of least peak that the solver can reach.
        peak_bytes: Its simulated dynamic peak. When infeasible: the least budget that would do.
        seconds: Its simulated seconds.
        solve_seconds: Wall seconds that the solver took.
        bound_seconds: A proven lower bound on the seconds of any schedule within the budget, or None.
    """

    solver: str
    status: Status
    schedule: Schedule
    peak_bytes: int
    seconds: float
    solve_seconds: float
    bound_seconds: float | None = None

    @property
    def feasible(self) -> bool:
        """Whether the schedule fits the budget."""
        return self.status is not Status.INFEASIBLE

    def infeasible(self) -> "Solution":
        """The same schedule, as what is nearest to a budget that it does not fit."""
        return replace(self, status=Status.INFEASIBLE, bound_seconds=None)

    @property
    def gap(self) -> float | None:
        """Relative distance of ``seconds`` to the proven bound; None where nothing is proven."""
        if self.bound_seconds is None or not self.feasible:
            return None
        return max(0.0, self.seconds / self.bound_seconds - 1.0) if self.bound_seconds > 0 else None


def best_of(
    solver: str,
    graph: Graph,
    schedules: "list[Schedule]",
    budget: int | None,
    *,
    solve_seconds: float,
) -> Solution:
    """Simulate candidate schedules and choose: the fastest within ``budget`` (bytes), or for a
    budget of None (and when none fits) the one of least peak, then least seconds."""
    judged = [(simulate(graph, s), s) for s in schedules]
    fitting = [j for j in judged if budget is None or j[0].peak_bytes <= budget]
    if budget is not None and fitting:
        timeline, schedule = min(fitting, key=lambda j: (j[0].seconds, j[0].peak_bytes))
        status = Status.FEASIBLE
    else:
        timeline, schedule = min(judged, key=lambda j: (j[0].peak_bytes, j[0].seconds))
        status = Status.FEASIBLE if budget is None else Status.INFEASIBLE
    return Solution(solver, status, schedule, timeline.peak_bytes, timeline.seconds, solve_seconds)
