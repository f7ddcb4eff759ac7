"""Recompute nothing: the captured order as it is, values freed at their last use.

Elsewhere: "vanilla", "store all". The baseline of every comparison; optimal in seconds.
"""

from solvers.model.incumbent import Search
from solvers.model.solution import Solution
from solvers.model.solver import solver

NAME = "none"


@solver(NAME)
def solve(search: Search) -> Solution:
    """Keep every value that constraints do not want recomputed."""
    kept, fastest = search.try_everything(), search.graph.base_seconds
    return search.solution(bound_seconds=fastest, optimal=kept.seconds <= fastest)
