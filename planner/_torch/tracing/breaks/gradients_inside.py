"""Gradients that a forward takes of its own results, by ``torch.autograd.grad``.

Dynamo puts the call into the graph, and AOTAutograd makes of it the operations of which the inner backward
consists: they are operations of the forward like others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import torch as functions
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import GraphModule
from torch.nn import Parameter

from planner._torch.autograd import edge_of, edges_behind
from planner._torch.execution.function_calls import BACKWARD_OF_A_FUNCTION
from planner._torch.patches import replace, replaced
from planner._torch.tracing.breaks.calls_left_out import end_graph
from planner._torch.tracing.rules import handle, handler_of

IsOurs = Callable[[Any], bool]
"""Whether an instruction translator of Dynamo's traces for a planned module."""

GRADIENTS_INSIDE = {"trace_autograd_ops": True}
"""Dynamo's setting by which it follows such calls."""

_NONE: set[Any] = set()
_CREATE_GRAPH = 4
"""The position of that argument, of both functions that differentiate."""


@functools.cache
def follow_gradients_inside(is_ours: IsOurs) -> None:
    """Change which calls Dynamo traces: trace some that it gives up, and give up some that it gets wrong.

    It gives up where the differentiated tensor comes from another graph. That is wrong only if, in that other
    graph, a tensor that the call differentiates by leads to another input of this graph; calls of planned
    graphs look for that (`planner/_torch/joint/gradients_inside.py`). It traces ``tensor.backward()`` as
    plain operations; in eager that runs the hooks of parameters and adds to gradients in place.
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
        with replaced(functions, {"_collect_all_grad_fns": lambda _: _NONE}):
            found = differentiate(variable, tx, *args, **kwargs)
        if not by_default and _lacks_some(found) and _comes_from_outside(tx, args, kwargs):
            # Python code branches on the None, before any call of the graph can find that it is wrong.
            end_graph(
                "a gradient that may lead through another graph",
                "torch.autograd.grad(..., allow_unused=True) gives None as far as this graph tells, and what "
                "is differentiated is computed of inputs of the graph that may lead to that tensor.",
            )
        return found

    return handler


def _lacks_some(found: Any) -> bool:
    return any(item.is_python_constant() for item in found.unpack_var_sequence(None))


def _comes_from_outside(tx: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the differentiated tensor depends on an input of the graph that may have been computed before.

    Parameters have not: they are leaves.
    """
    outputs = functions._collect_tensors_with_sources(args[0] if args else kwargs["outputs"])
    starts = [edge_of(tensor) for tensor, _ in outputs if tensor.requires_grad]
    behind = {node for start in starts for node, _ in edges_behind(start)}
    for variable in tx.output.input_source_to_var.values():
        if isinstance(variable, TensorVariable) and not issubclass(variable.class_type, Parameter):
            value = variable.as_proxy().node.meta["example_value"]
            if value.requires_grad and edge_of(value)[0] in behind:
                return True
    return False


def _calls_functions(output: Any) -> bool:
    return any(
        isinstance(part, GraphModule) and name.startswith(BACKWARD_OF_A_FUNCTION)
        for name, part in output.nn_modules.items()
    )
