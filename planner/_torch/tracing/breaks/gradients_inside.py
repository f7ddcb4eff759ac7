"""Gradients that a forward takes of its own results, by ``torch.autograd.grad``.

Dynamo puts the call into the graph, and AOTAutograd makes of it the operations of which the inner backward
consists: they are operations of the forward like others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import GraphModule

from planner._torch.execution.function_calls import BACKWARD_OF_A_FUNCTION
from planner._torch.patches import replace
from planner._torch.tracing.breaks.calls_left_out import end_graph
from planner._torch.tracing.rules import handle, handler_of

IsOurs = Callable[[Any], bool]
"""Whether an instruction translator of Dynamo's traces for a planned module."""

GRADIENTS_INSIDE = {"trace_autograd_ops": True}
"""Dynamo's setting by which it follows such calls."""

_CREATE_GRAPH = 4
"""The position of that argument, of both functions that differentiate."""


@functools.cache
def follow_gradients_inside(is_ours: IsOurs) -> None:
    """Give up some calls that Dynamo gets wrong.

    It traces ``tensor.backward()`` as plain operations; in eager that runs the hooks of parameters and adds
    to gradients in place.
    """
    for differentiate in (torch.autograd.grad, torch._functorch.eager_transforms._autograd_grad):
        by_default = differentiate is not torch.autograd.grad
        followed = _unless_functions(handler_of(differentiate), by_default, is_ours)
        handle("gradients", differentiate, followed)
    backward = TensorVariable.method_backward

    def as_written(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tx):
            end_graph("a backward inside of the forward", "tensor.backward() is called.")
        return backward(self, tx, *args, **kwargs)

    replace(TensorVariable, "method_backward", as_written)


def _unless_functions(differentiate: Any, by_default: bool, is_ours: IsOurs) -> Callable[..., Any]:
    """Give up gradients of gradients (``create_graph``, or ``by_default``) of functions of the user's."""

    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(tx):
            return differentiate(variable, tx, *args, **kwargs)
        again = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else kwargs.get("create_graph")
        if (by_default if again is None else again.as_python_constant()) and _calls_functions(tx.output):
            # Dynamo traces their backwards without gradients: these would be missing, silently.
            end_graph(
                "gradients of gradients through an autograd function",
                "A torch.autograd.Function is differentiated inside of the forward, and then again.",
            )
        return differentiate(variable, tx, *args, **kwargs)

    return handler


def _calls_functions(output: Any) -> bool:
    return any(
        isinstance(part, GraphModule) and name.startswith(BACKWARD_OF_A_FUNCTION)
        for name, part in output.nn_modules.items()
    )
