"""The result of a solver: a schedule, its costs, and how good it is known to be."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from solvers.model.arrays import Schedule

Progress = Callable[[str, float], None]
"""Called with a short text, and the fraction of the work that is done, from 0 to 1."""


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
        status: Optimal (none within the budget is faster, up to the gap that the solver allows), feasible, or
            infeasible (none was found within the budget).
        schedule: The schedule; if infeasible, the one of the least peak that the solver found.
        peak_bytes: Its simulated dynamic peak: the least budget that it fits.
        seconds: Its simulated seconds.
        solve_seconds: Wall seconds that the solver took.
        bound_seconds: A proven lower bound on the seconds of any schedule within the budget; None where none
            is proven.
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
        """The same schedule, as the nearest one to a budget that it does not fit."""
        return replace(self, status=Status.INFEASIBLE, bound_seconds=None)

    @property
    def gap(self) -> float | None:
        """The share of the proven bound by which ``seconds`` is over it; None where nothing is proven."""
        if self.bound_seconds is None or not self.feasible:
            return None
        return max(0.0, self.seconds / self.bound_seconds - 1.0) if self.bound_seconds > 0 else None
