"""Rules by which Dynamo treats calls of a function.

PyTorch forgets all changes of them whenever a process group is made.
"""

from collections.abc import Callable
from typing import Any

from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from planner._torch.patches import handler_row
from planner._torch.tracing.named_functions import look_inside_wrappers

_handled: set[Callable[..., Any]] = set()
_changed: list[dict[Any, Any]] = []
"""The rules after the last change."""


def handler_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The handler that Dynamo calls for a call of a function; None where it has none."""
    handler: Callable[..., Any] | None = TorchInGraphFunctionVariable._get_handlers().get(function)
    return handler


def handle(subject: str, function: Callable[..., Any], handler: Callable[..., Any]) -> None:
    """Have Dynamo ask a handler about calls of a function that it would not trace, or not look at.

    Args:
        subject: That of the handler's row in :data:`planner._torch.patches.PATCHES`.
        function: The function.
        handler: Called with Dynamo's variable, its translator and the arguments; returns Dynamo's variable of
            the result, or None for Dynamo's own treatment.
    """
    handler_row(subject)
    _handled.add(function)
    get_torch_obj_rule_map()[function] = TorchInGraphFunctionVariable
    TorchInGraphFunctionVariable._get_handlers()[function] = handler


def keep_rules() -> None:
    """Change the present rules, if that was not done; call this before each trace.

    Functions that had rules keep them, even where users' wrappers now have their names, so that a model that
    was planned with them is captured alike.
    """
    rules = get_torch_obj_rule_map()
    if _changed and _changed[0] is rules:
        return
    rules |= dict.fromkeys(_handled, TorchInGraphFunctionVariable)
    look_inside_wrappers(rules)
    for earlier in _changed:
        rules |= {function: rule for function, rule in earlier.items() if function not in rules}
    _changed[:] = [rules]
