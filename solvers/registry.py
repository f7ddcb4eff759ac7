"""The solvers by name."""

from typing import Protocol

from solvers import checkpoint_all, manual, portfolio, store_all
from solvers.chains import lower_sets, rotor, sqrt_n
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.solution import Progress, Solution
from solvers.programs import exact_ilp, ilp


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
    store_all.NAME: store_all.solve,
    checkpoint_all.NAME: checkpoint_all.solve,
    manual.NAME: manual.solve,
    rotor.NAME: rotor.solve,
    exact_ilp.NAME: exact_ilp.solve,
    ilp.NAME: ilp.solve,
    lower_sets.NAME: lower_sets.solve,
    sqrt_n.NAME: sqrt_n.solve,
}
