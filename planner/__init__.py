"""Automatic checkpoint placement: give a module and a memory budget, get a training step within it.

import planner

plan = planner.plan(model, args=(x, y), budget="60%")
model = plan.apply(model)
"""

from typing import TYPE_CHECKING, Any

from planner.cli.own_packages import check_solvers
from planner.errors import (
    BudgetError,
    CaptureError,
    InfeasibleBudget,
    InputsChanged,
    PlanFileError,
    PlanMismatch,
    PlannerError,
    PlanWarning,
)
from planner.imports import import_without_drawing
from planner.version import __version__ as __version__

if TYPE_CHECKING:
    from planner.api import plan, prepare, sweep
    from planner.batch.max_batch import max_batch
    from planner.blocks.decorators import checkpointable, no_recompute, recompute
    from planner.estimation.comparison import compare
    from planner.estimation.estimate import estimate
    from planner.estimation.reserve import reserve
    from planner.estimation.suggest import suggest
    from planner.lazy.auto_checkpoint import auto_checkpoint
    from planner.lazy.step import step
    from planner.parallel.strategies import DDP, FSDP2
    from planner.planfile.budget import format_bytes
    from planner.prepared_step import PreparedStep
    from planner.runtime.install import remove
    from planner.user_plan import Plan
    from planner.verification.verify import verify


# Looked up on first use, so that `import planner` loads neither torch nor a solver.
_HOMES = {
    "DDP": "planner.parallel.strategies",
    "FSDP2": "planner.parallel.strategies",
    "Plan": "planner.user_plan",
    "PreparedStep": "planner.prepared_step",
    "auto_checkpoint": "planner.lazy.auto_checkpoint",
    "checkpointable": "planner.blocks.decorators",
    "compare": "planner.estimation.comparison",
    "estimate": "planner.estimation.estimate",
    "format_bytes": "planner.planfile.budget",
    "max_batch": "planner.batch.max_batch",
    "no_recompute": "planner.blocks.decorators",
    "plan": "planner.api",
    "prepare": "planner.api",
    "recompute": "planner.blocks.decorators",
    "remove": "planner.runtime.install",
    "reserve": "planner.estimation.reserve",
    "step": "planner.lazy.step",
    "suggest": "planner.estimation.suggest",
    "sweep": "planner.api",
    "verify": "planner.verification.verify",
}

__all__ = [
    "DDP",
    "FSDP2",
    "BudgetError",
    "CaptureError",
    "InfeasibleBudget",
    "InputsChanged",
    "Plan",
    "PlanFileError",
    "PlanMismatch",
    "PlanWarning",
    "PlannerError",
    "PreparedStep",
    "auto_checkpoint",
    "checkpointable",
    "compare",
    "estimate",
    "format_bytes",
    "max_batch",
    "no_recompute",
    "plan",
    "prepare",
    "recompute",
    "remove",
    "reserve",
    "step",
    "suggest",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_solvers()
    value = getattr(import_without_drawing(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
