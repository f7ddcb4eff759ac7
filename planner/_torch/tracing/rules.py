"""How Dynamo treats calls of a function.

PyTorch forgets all that was changed of them whenever a process group is made.
"""

from collections.abc import Callable
from typing import Any

from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from planner._torch.patches import handler_row
from planner._torch.tracing.named_functions import look_inside_wrappers

_handled: set[Callable[..., Any]] = set()
_changed: list[dict[Any, Any]] = []
"""The rules as they were last changed."""


def handler_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What Dynamo calls for a call of a function; None where it has nothing for it."""
    handler: Callable[..., Any] | None = TorchInGraphFunctionVariable._get_handlers().get(function)
    return handler


def handle(subject: str, function: Callable[..., Any], handler: Callable[..., Any]) -> None:
    """Have Dynamo ask a handler about calls of a function, which it would not trace, or not look at.

    Args:
        subject: That of the handler's row in :data:`planner._torch.patches.PATCHES`.
        function: The function.
        handler: Called with Dynamo's variable, its translator and the arguments; returns Dynamo's variable of
            the result, or None for what Dynamo does by itself.
    """
    handler_row(subject)
    _handled.add(function)
    get_torch_obj_rule_map()[function] = TorchInGraphFunctionVariable
    TorchInGraphFunctionVariable._get_handlers()[function] = handler


def keep_rules() -> None:
    """Change the rules that are there now, if that was not done; to be called before each trace.

    Functions that had rules keep them, also where users' wrappers have their names now: what was planned
    with them is found again.
    """
    rules = get_torch_obj_rule_map()
    if _changed and _changed[0] is rules:
        return
    rules |= dict.fromkeys(_handled, TorchInGraphFunctionVariable)
    look_inside_wrappers(rules)
    for earlier in _changed:
        rules |= {function: rule for function, rule in earlier.items() if function not in rules}
    _changed[:] = [rules]
