"""The interface of solvers, and the decorator that makes one."""

import functools
from collections.abc import Callable
from typing import Protocol

from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.solution import Progress, Solution


class Solve(Protocol):
    """A function from a graph and a budget to a solution."""

    def __call__(
        self,
        graph: Graph,
        budget: int | None,
        *,
        time_limit: float | None = None,
        progress: Progress | None = None,
        constraints: Constraints | None = None,
    ) -> Solution:
        """Solve a problem.

        Args:
            graph: The problem.
            budget: Bytes of dynamic peak; None asks for the least peak.
            time_limit: Wall seconds.
            progress: Called with the present action and the fraction done.
            constraints: Values that are always kept or always recomputed.

        Returns:
            The fastest schedule found; infeasible with the least peak found when none fits.
        """


def solver(
    name: str, *, seconds: float | None = None
) -> Callable[[Callable[[Search], Solution | None]], Solve]:
    """Make a solver of a function that offers schedules to a search.

    The function is given the search, and returns a solution only where it knows more than its best
    candidate: a bound, or that it is optimal.

    Args:
        name: The solver's name in plans and on the command line.
        seconds: The wall seconds that it takes at most where no time limit is given; None for no limit.
    """

    def decorate(offer: Callable[[Search], Solution | None]) -> Solve:
        def solve(
            graph: Graph,
            budget: int | None,
            *,
            time_limit: float | None = None,
            progress: Progress | None = None,
            constraints: Constraints | None = None,
        ) -> Solution:
            limit = seconds if time_limit is None else time_limit
            search = Search(name, graph, budget, limit, progress, constraints or NO_CONSTRAINTS)
            return offer(search) or search.solution()

        functools.update_wrapper(solve, offer, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        del solve.__wrapped__  # type: ignore[attr-defined]
        return solve

    return decorate
