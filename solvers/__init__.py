"""Where to place checkpoints: solvers over plain graphs of operations and storages.

Nothing here knows of torch. A :class:`Graph` states the problem, a solver from :data:`SOLVERS`
answers it with a :class:`Solution`, and :func:`simulate` says what its schedule costs.
"""

from solvers.constraints import Constraints
from solvers.graph import GLUE_REGION, Graph, GraphError, Op, Phase, Value
from solvers.recompute import recompute
from solvers.registry import SOLVERS
from solvers.schedule import Timeline, alive_at, check, simulate
from solvers.solution import Progress, Solution, Status

__all__ = [
    "GLUE_REGION",
    "SOLVERS",
    "Constraints",
    "Graph",
    "GraphError",
    "Op",
    "Phase",
    "Progress",
    "Solution",
    "Status",
    "Timeline",
    "Value",
    "alive_at",
    "check",
    "recompute",
    "simulate",
]
