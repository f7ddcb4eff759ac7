"""Automatic checkpoint placement: give a module and a memory budget, get a training step within it.

import planner

plan = planner.plan(model, args=(x, y), budget="60%")
model = plan.apply(model)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from planner.own_packages import check_solvers

if TYPE_CHECKING:
    from planner.api import auto_checkpoint as auto_checkpoint
    from planner.api import plan as plan
    from planner.api import sweep as sweep
    from planner.batch_search import max_batch as max_batch
    from planner.budget import format_bytes as format_bytes
    from planner.install import remove as remove
    from planner.plan_file import Plan as Plan
    from planner.verification import verify as verify

__version__ = "0.1.0"

# Looked up on first use, so that `import planner` loads neither torch nor a solver.
_HOMES = {
    "Plan": "planner.plan_file",
    "auto_checkpoint": "planner.api",
    "format_bytes": "planner.budget",
    "max_batch": "planner.batch_search",
    "plan": "planner.api",
    "remove": "planner.install",
    "sweep": "planner.api",
    "verify": "planner.verification",
}

__all__ = [
    "BudgetError",
    "CaptureError",
    "InfeasibleBudget",
    "InputsChanged",
    "Plan",
    "PlanFileError",
    "PlanMismatch",
    "PlanWarning",
    "PlannerError",
    "auto_checkpoint",
    "format_bytes",
    "max_batch",
    "plan",
    "remove",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_solvers()
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
