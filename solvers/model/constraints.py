"""The user's constraints: values that are always kept, values that are always recomputed."""

from dataclasses import dataclass

import numpy as np

from solvers.model.arrays import ValueMask
from solvers.model.graph import Graph, GraphError


@dataclass(frozen=True)
class Constraints:
    """Both are bool arrays over the values of a graph; None stands for no value.

    Attributes:
        keep: Values that every schedule keeps from the forward phase on.
        recompute: Values that no schedule keeps. Those that nothing can recompute are kept all the same.

    Raises:
        GraphError: A value is in both.
    """

    keep: ValueMask | None = None
    recompute: ValueMask | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.recompute is not None:
            both = np.flatnonzero(self.keep & self.recompute)
            if len(both):
                raise GraphError(f"value {both[0]} is to be both kept and recomputed; choose one")

    def apply(self, kept: ValueMask) -> ValueMask:
        """The nearest choice of kept values that honours the constraints."""
        if self.keep is not None:
            kept = kept | self.keep
        if self.recompute is not None:
            kept = kept & ~self.recompute
        return kept

    def free(self, graph: Graph) -> ValueMask:
        """Values about which a solver may decide: those that can be recomputed and are not pinned."""
        free: ValueMask = graph.recompute_row >= 0
        if self.keep is not None:
            free &= ~self.keep
        if self.recompute is not None:
            free &= ~self.recompute
        return free


NO_CONSTRAINTS = Constraints()
