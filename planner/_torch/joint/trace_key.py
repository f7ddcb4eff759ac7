"""The cache key of a joint graph: all facts about the Dynamo graph that it depends on.

AOTAutograd traces two graphs of the same key into the same joint graph. A graph has no key if it depends on
something that cannot be compared: constants with data, code and operators that are not PyTorch's own,
symbolic sizes, subclasses of tensors, modes of the caller.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from planner._torch.autocast_state import autocast_state
from planner._torch.joint.memory_layout import MemoryLayout
from planner._torch.module_paths import marks_of, module_of
from planner._torch.own_code import is_of_pytorch

_FLAGS = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_cache_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_dtype,
    # Of both together PyTorch refuses to tell where they were set one by one.
    partial(attrgetter("cuda.matmul.fp32_precision"), torch.backends),
    partial(attrgetter("mkldnn.matmul.fp32_precision"), torch.backends),
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch._C._get_mkldnn_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
)
_PLAIN = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_OF_PYTORCH = ("torch", "_operator", "math", "builtins")
_NAMESPACES = ("aten", "prims", "prim")
_CALLS_OF_GRAPHS = ("autograd_function_apply", "tag_activation_checkpoint")
_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class _NoKeyError(Exception):
    """The graph depends on something that cannot be compared."""


def trace_key(
    graph: GraphModule, inputs: Sequence[Any], layouts: Mapping[int, MemoryLayout]
) -> Hashable | None:
    """The key of a Dynamo graph that is traced here and now; None where it has none.

    Args:
        graph: The graph, its nodes with the names of their modules (:func:`name_modules`).
        inputs: Its example inputs.
        layouts: How the gradients of its outputs lie in memory.
    """
    try:
        return (
            _graph(graph),
            _inputs(inputs),
            tuple(sorted(layouts.items())),
            _state(),
        )
    except _NoKeyError:
        return None


def _state() -> Hashable:
    modes = _get_current_dispatch_mode_stack()
    if any(not isinstance(mode, FakeTensorMode) and not mode.is_infra_mode() for mode in modes):
        raise _NoKeyError
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_function_stack():
        raise _NoKeyError
    autocast = tuple((kind, *state) for kind, state in autocast_state().items())
    return (*(flag() for flag in _FLAGS), autocast, len(torch.library._impls))


def _graph(graph: GraphModule) -> Hashable:
    numbers = {node: i for i, node in enumerate(graph.graph.nodes)}
    return tuple(_node(graph, node, numbers) for node in graph.graph.nodes)


def _node(graph: GraphModule, node: Node, numbers: Mapping[Node, int]) -> Hashable:
    target: Hashable = node.target
    if node.op == "get_attr":
        part = graph.get_submodule(str(node.target)) if hasattr(graph, str(node.target)) else None
        if not isinstance(part, GraphModule):
            raise _NoKeyError
        target = _graph(part)
    elif node.op == "call_module" or (node.op == "call_function" and not _is_known(target)):
        raise _NoKeyError
    return (
        node.name,
        node.op,
        target,
        _literal(node.args, numbers),
        _literal(node.kwargs, numbers),
        module_of(node),
        marks_of(node),
        tuple(map(_source, node.meta.get("source_fn_stack") or ())),
        node.meta.get("stack_trace"),  # plans name the lines of the code that they are of
    )


def _source(source: tuple[str, Any]) -> Hashable:
    name, function = source
    return name, function if isinstance(function, str) else getattr(function, "__qualname__", str(function))


def _is_known(target: Any) -> bool:
    if isinstance(target, FunctionType):
        return is_of_pytorch(target.__code__)
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _NAMESPACES
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() in _CALLS_OF_GRAPHS
    return str(getattr(target, "__module__", None)).partition(".")[0] in _OF_PYTORCH


def _literal(value: Any, numbers: Mapping[Node, int]) -> Hashable:
    if isinstance(value, Node):
        return ("node", numbers[value])
    if type(value) in _PLAIN:
        return (type(value), value)
    if type(value) in (float, complex):
        return (type(value), repr(value))  # tells -0.0 from 0.0, and nan is nan
    if isinstance(value, slice):
        return ("slice", _literal((value.start, value.stop, value.step), numbers))
    if isinstance(value, dict):
        return ("dict", *((key, _literal(member, numbers)) for key, member in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_literal(member, numbers) for member in value))
    raise _NoKeyError


def _inputs(inputs: Sequence[Any]) -> Hashable:
    seen: dict[tuple[str, int], int] = {}
    return tuple(_input(value, seen) for value in inputs)


def _input(value: Any, seen: dict[tuple[str, int], int]) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return _literal(value, {})
    if type(value) not in _TENSORS or value.layout is not torch.strided:
        raise _NoKeyError
    if isinstance(value, FakeTensor) and value._has_symbolic_sizes_strides:
        raise _NoKeyError
    storage = value.untyped_storage()
    return (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        storage.nbytes(),
        seen.setdefault(("tensor", id(value)), len(seen)),
        seen.setdefault(("storage", storage._cdata), len(seen)),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        isinstance(value, torch.nn.Parameter),
    )
