"""Calls of PyTorch's functions by name, where users may have put wrappers under these names.

Dynamo takes any function that it finds under such a name (``F.relu``) for PyTorch's, and does not look
inside. The code of its graphs calls functions and methods by name, and PyTorch's functions that are called
under a mode call themselves by name: a wrapper would run twice.
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
        rules: Dynamo's, by the function. Changed in place.
    """
    for function in [f for f in rules if isinstance(f, FunctionType) and not is_of_pytorch(f.__code__)]:
        del rules[function]


def call_what_was_captured(graph: GraphModule) -> None:
    """Let a Dynamo graph call the very functions that it was captured with, whatever has their names now.

    To be called by the backend that Dynamo hands the graph to.
    """
    for part in graph.modules():
        if not isinstance(part, GraphModule):
            continue
        changed = False
        for node in part.graph.nodes:
            original = _hidden(node)
            if original is not None:
                node.op, node.target = "call_function", _by_object(original)
                changed = True
        if changed:
            part.recompile()


def _hidden(node: Node) -> Any | None:
    """The function that a node should call, where its name now stands for another one."""
    if node.op == "call_method":
        name = str(node.target)
        return getattr(torch._C.TensorBase, name, None) if _is_replaced(name) else None
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, _CALLABLES):
        return None
    try:
        name = _get_qualified_name(target)
    except RuntimeError:  # its name stands for something else where it is looked for
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
    """A copy of a function that torch.fx does not take for PyTorch's, and so calls as an object."""
    if isinstance(function, FunctionType):
        function = _knowing_itself(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _knowing_itself(function: FunctionType) -> FunctionType:
    """A copy of a function to which its own name means itself."""
    names = dict(function.__globals__)
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copy
    return copy
