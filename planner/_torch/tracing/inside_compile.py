"""Planned modules among others that ``torch.compile`` compiles."""

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from planner._torch import compat
from planner._torch.compat import disable
from planner._torch.patches import replace

REASON = (
    "a planned module runs by its plan, not compiled; what is around it is. Leave fullgraph=True out, or "
    "planner.remove(model)"
)
A_REGION = "a region"
"""How the reason begins for which a graph ends where a region is called."""
REGION = "a region of the plan begins, which is graphs of its own"
RUNS_A_PLAN = "_planner_runs_a_plan"
"""An attribute of the call that is installed in a planned module."""
ENDS_A_GRAPH = "_planner_ends_a_graph"
"""The same for a part of a planned module that is graphs of its own."""


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``torch.compile`` calls uncompiled, with all calls in it."""
    compiled: Callable[..., Any] = disable(function, REASON)
    return compiled


@functools.cache
def call_planned_modules(is_ours: Callable[[Any], bool]) -> None:
    """End a graph of the user's own ``torch.compile`` where a planned module is called.

    Dynamo traces the methods of a module's class, and misses the call that is installed in the module.

    Args:
        is_ours: Whether Dynamo traces for a plan; a planned part of a planned module runs by the outer plan.
    """
    call = UnspecializedNNModuleVariable.call_function

    def unless_planned(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self.value._compiled_call_impl, ENDS_A_GRAPH) and is_ours(tx):
            unimplemented(gb_type=A_REGION, context=type(self.value).__name__, explanation=REGION, hints=[])
        plan = hasattr(self.value._compiled_call_impl, RUNS_A_PLAN)
        if plan and not (is_ours(tx) or compat.is_exporting()):
            unimplemented(
                gb_type="a planned module", context=type(self.value).__name__, explanation=REASON, hints=[]
            )
        return call(self, tx, *args, **kwargs)

    replace(UnspecializedNNModuleVariable, "call_function", unless_planned)
