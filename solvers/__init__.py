"""Where to place checkpoints: solvers over plain graphs of operations and storages.

Nothing here knows of torch. A :class:`Graph` states the problem, a solver from :data:`SOLVERS`
answers it with a :class:`Solution`, and :func:`simulate` says what its schedule costs.
"""

from solvers.model.constraints import Constraints
from solvers.model.graph import GLUE_REGION, Graph, GraphError, Op, Phase, Value
from solvers.model.just_in_time import recompute
from solvers.model.schedule import Timeline, alive_at, check, simulate
from solvers.model.solution import Progress, Solution, Status
from solvers.registry import SOLVERS

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
