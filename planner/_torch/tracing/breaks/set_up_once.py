"""Set-up that a library does in a model's first forward only, run before the forward is traced."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable

from planner._torch.tracing.rules import handle, handler_of

IsOurs = Callable[[Any], bool]
"""Whether an instruction translator of Dynamo's traces for a planned module."""

_SETS_UP = {
    "transformers.utils.output_capturing": (
        "maybe_install_capturing_hooks",
        "_output_capturing_hooks_installed",
    )
}
"""Functions that set up the module that they are called with unless it has an attribute, by the library's
module. They compute nothing, and do nothing to a module that has the attribute."""


def set_up_before_tracing(is_ours: IsOurs) -> None:
    """Run such a function for real where the trace reaches it, and trace again from the start.

    Dynamo cannot trace it, since it takes a lock and registers hooks. So the first forward would break into
    pieces, while later ones, which the plan is for, would not. Call this before each trace: the libraries may
    have been imported since the last one.
    """
    for library, (name, attribute) in _SETS_UP.items():
        function = getattr(sys.modules.get(library), name, None)
        if function is not None and handler_of(function) is None:
            handle("set up once", function, _run_for_real(function, attribute, is_ours))


def _run_for_real(function: FunctionType, attribute: str, is_ours: IsOurs) -> Callable[..., Any]:
    def handler(_variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        module = args[0].value if len(args) == 1 and hasattr(args[0], "value") else None
        if not is_ours(tx) or not isinstance(module, torch.nn.Module):
            return UserFunctionVariable(function).call_function(tx, list(args), kwargs)
        if not getattr(module, attribute, False):
            function(module)
            raise RestartAnalysis(restart_reason=f"{function.__name__} was run")
        return VariableTracker.build(tx, None)

    return handler
