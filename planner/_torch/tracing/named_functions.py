"""Lets wrappers that users put under the names of PyTorch's functions (``F.relu = wrapped``) run once a call.

Dynamo takes any function that it finds under such a name for PyTorch's, and does not trace into it
(``torch/_dynamo/trace_rules.py``): the wrapper would not run. If it does trace into the wrapper, the graph
has PyTorch's own function in it, but torch.fx writes code that calls this by name, and so the wrapper again:
it would run twice. Functions with ``handle_torch_function`` call themselves by name, too, under a mode.
"""

import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import _get_qualified_name

from planner._torch.own_code import is_of_pytorch

_CALLABLES = (FunctionType, BuiltinFunctionType, MethodDescriptorType)


def look_inside_wrappers(rules: dict[Any, Any]) -> None:
    """Have Dynamo trace into users' functions that it found under PyTorch's names.

    Args:
        rules: Dynamo's rules by function; those for users' functions are deleted.
    """
    for function in [f for f in rules if isinstance(f, FunctionType) and not is_of_pytorch(f.__code__)]:
        del rules[function]


def call_what_was_captured(graph: GraphModule) -> None:
    """Make a Dynamo graph call the very functions that it was captured with, not those of the same names.

    A backend calls it first, with the graph that Dynamo hands over.
    """
    for part in graph.modules():
        if not isinstance(part, GraphModule):
            continue
        changed = False
        for node in part.graph.nodes:
            original = _replaced_function(node)
            if original is not None:
                node.op, node.target = "call_function", _by_object(original)
                changed = True
        if changed:
            part.recompile()


def _replaced_function(node: Node) -> Any | None:
    """The function that a node was captured with, if its name now stands for another; else None."""
    if node.op == "call_method":
        name = str(node.target)
        return getattr(torch._C.TensorBase, name, None) if _is_replaced(name) else None
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, _CALLABLES):
        return None
    try:
        name = _get_qualified_name(target)
    except RuntimeError:  # PyTorch found another function under that name
        return target
    first, *path = name.split(".")
    if first != "torch":
        return None
    found: Any = torch
    for part in path:
        found = getattr(found, part, None)
    return None if found is target else target


def _is_replaced(method: str) -> bool:
    """Whether a method of tensors is no longer PyTorch's own."""
    found = getattr(torch.Tensor, method, None)
    return isinstance(found, FunctionType) and not is_of_pytorch(found.__code__)


@functools.cache
def _by_object(function: Any) -> Callable[..., Any]:
    """A function that calls another one. It is not PyTorch's, so torch.fx calls the object, not a name."""
    if isinstance(function, FunctionType):
        function = _calling_itself(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _calling_itself(function: FunctionType) -> FunctionType:
    """A copy of a function in whose global variables its own name is the copy, not a user's wrapper."""
    names = dict(function.__globals__)
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copy
    return copy
