"""The user's own checkpoints, taken as they are.

Elsewhere: ``collection`` of OpenAI's ``gradients_memory``, the checkpoint variables of Paddle's
``RecomputeOptimizer``.

The values of ``constraints.keep`` are kept, and those computed after the last of them (their backward
comes at once); everything else is recomputed. The budget is ignored.
"""

import numpy as np

from solvers.model.cut_points import forward_uses, pinned_values
from solvers.model.incumbent import Search
from solvers.model.solver import solver

NAME = "manual"


@solver(NAME)
def solve(search: Search) -> None:
    """Keep the values of ``constraints.keep`` and recompute the rest."""
    graph = search.graph
    kept = pinned_values(graph, forward_uses(graph))
    checkpoints = np.flatnonzero(search.constraints.apply(np.zeros_like(kept)))
    if len(checkpoints):
        kept[checkpoints] = True
        kept |= (graph.producer >= graph.producer[checkpoints].max()) & (
            graph.producer < graph.forward_length
        )
    search.try_kept(kept)
