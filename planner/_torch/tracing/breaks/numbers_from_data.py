"""Private PyTorch APIs: questions about numbers that a forward has just read from its data.

Tested with torch 2.13.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.source import LocalSource
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from planner._torch.tracing.rules import ask_handler_of

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_QUESTIONS = (math.isfinite, math.isinf, math.isnan)
_HANDED_ON = "___stack"
"""How Dynamo names what the code behind a break is handed beside variables: what the call there returned."""


@functools.cache
def break_at_questions_about_data(is_ours: Callable[[Any], bool]) -> None:
    """End a graph where a number is compared that the call at the last break returned, as ``x.item()`` does.

    The answer is one of two. Dynamo takes the number itself for a constant, and would capture what comes
    behind anew for each.

    Args:
        is_ours: Whether an instruction translator of Dynamo's traces for a planned module.
    """

    def end_if_read(tx: Any, args: Any) -> None:
        if any(map(_was_read, args)) and is_ours(tx):
            unimplemented(
                gb_type="a question about a number that was read from data",
                context=str(args),
                explanation="A number is compared that the forward read from its data.",
                hints=[],
            )

    def unless_read(compare: Callable[..., Any]) -> Callable[..., Any]:
        def handler(tx: Any, args: Any, kwargs: Any) -> Any:
            end_if_read(tx, args)
            return compare(tx, args, kwargs)

        return handler

    handlers, call = symbolic_convert.compare_op_handlers, TorchInGraphFunctionVariable.call_function
    handlers |= {comparison: unless_read(handlers[comparison]) for comparison in _COMPARISONS}

    def unless_asked(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if any(self.value is question for question in _QUESTIONS):
            end_if_read(tx, args)
        return call(self, tx, args, kwargs)

    for question in _QUESTIONS:
        ask_handler_of(question)
    TorchInGraphFunctionVariable.call_function = unless_asked  # type: ignore[method-assign]


def _was_read(variable: Any) -> bool:
    if not isinstance(variable, LazyVariableTracker) or variable.is_realized():
        return False
    cache: Any = variable._cache
    if hasattr(cache, "lazy_vars"):  # from PyTorch 2.15 on: it is computed of such
        return any(map(_was_read, cache.lazy_vars))
    source = cache.source
    handed_on = isinstance(source, LocalSource) and source.local_name.startswith(_HANDED_ON)
    return handed_on and type(cache.value) is float
