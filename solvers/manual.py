"""The user's own checkpoints, taken as they are.

Elsewhere: ``collection`` of OpenAI's ``gradients_memory``, the checkpoint variables of Paddle's
``RecomputeOptimizer``.

Kept is what the constraints say is to be kept, and what is computed after the last of those values
(its backward comes at once); everything else is recomputed. Deaf to the budget.
"""

import numpy as np

from solvers.chains.cut_points import forward_uses, pinned_values
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.solution import Progress, Solution

NAME = "manual"


def solve(
    graph: Graph,
    budget: int | None,
    *,
    time_limit: float | None = None,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
) -> Solution:
    """Keep the values of ``constraints.keep`` and recompute the rest; arguments as of every solver."""
    search = Search(NAME, graph, budget, time_limit, progress, constraints or NO_CONSTRAINTS)
    kept = pinned_values(graph, forward_uses(graph))
    checkpoints = np.flatnonzero(search.constraints.apply(np.zeros_like(kept)))
    if len(checkpoints):
        kept[checkpoints] = True
        kept |= (graph.producer >= graph.producer[checkpoints].max()) & (
            graph.producer < graph.forward_length
        )
    search.try_kept(kept)
    return search.solution()
