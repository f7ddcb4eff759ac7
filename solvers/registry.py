"""The solvers by name."""

from typing import Protocol

from solvers import chain, checkpoint_all, exact_ilp, ilp, lower_sets, manual, none, portfolio, sqrt_n
from solvers.constraints import Constraints
from solvers.graph import Graph
from solvers.solution import Progress, Solution


class Solve(Protocol):
    """What every solver is: a function from a graph and a budget to a solution."""

    def __call__(
        self,
        graph: Graph,
        budget: int | None,
        *,
        time_limit: float | None = None,
        progress: Progress | None = None,
        constraints: Constraints | None = None,
    ) -> Solution:
        """Solve for a budget in bytes of dynamic peak; None asks for the least peak."""


SOLVERS: dict[str, Solve] = {
    portfolio.NAME: portfolio.solve,
    none.NAME: none.solve,
    checkpoint_all.NAME: checkpoint_all.solve,
    manual.NAME: manual.solve,
    chain.NAME: chain.solve,
    exact_ilp.NAME: exact_ilp.solve,
    ilp.NAME: ilp.solve,
    lower_sets.NAME: lower_sets.solve,
    sqrt_n.NAME: sqrt_n.solve,
}
