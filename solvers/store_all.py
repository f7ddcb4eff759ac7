"""Recompute nothing: the captured order as it is, values freed at their last use.

Elsewhere: "vanilla", "store all". The baseline of every comparison; optimal in seconds.
"""

import numpy as np

from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.solution import Progress, Solution

NAME = "none"


def solve(
    graph: Graph,
    budget: int | None,
    *,
    time_limit: float | None = None,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
) -> Solution:
    """Keep every value that constraints do not want recomputed; arguments as of every solver."""
    search = Search(NAME, graph, budget, time_limit, progress, constraints or NO_CONSTRAINTS)
    candidate = search.try_kept(np.ones(len(graph.values), dtype=bool))
    return search.solution(bound_seconds=graph.base_seconds, optimal=candidate.seconds <= graph.base_seconds)
