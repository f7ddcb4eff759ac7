"""Values that follow from sizes and constants alone are computed while a graph is captured.

Models compute positions from ``torch.arange`` and read from them whether sequences are packed: a condition on
a tensor, at which Dynamo ends the graph though no data decide it. Where a value is computed only from
integers and truth values that the forward itself makes, it is computed at once, as eager computes it, and the
graph goes on. Sizes that it depends on are guarded, symbolic ones by their number.
"""

import dis
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.fake import is_size, storage_key, without_modes
from planner._torch.operators import is_foreign
from planner._torch.patches import replace, replace_entries

_JUMPS = ("POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF", "JUMP_IF")
"""Beginnings of the names of Python's conditional jumps."""
_ON_TRUTH = ("TRUE", "FALSE", "OR_POP")
"""Ends of the names of those that test truth, not whether a value is None."""
_MOST_NODES = 1000
_MOST_ELEMENTS = 2**20
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_WRITES = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name in ("setitem", "delitem")
    or (name.startswith("i") and {name[1:], f"{name[1:]}_"} & set(dir(operator)))
)
"""Python's operators that write: ``x[0] = 1``, ``x += 1`` and the like."""

_backends: "weakref.WeakSet[Any]" = weakref.WeakSet()


def decide_constant_conditions(backend: Callable[..., Any], backend_of: Callable[[Any], Any]) -> None:
    """Let graphs captured for a backend go on where eager would read a value that is known here.

    Args:
        backend: The backend.
        backend_of: The backend that an instruction translator of Dynamo's traces for.
    """
    _backends.add(backend)
    _look_at_conditions(backend_of)


@functools.cache
def _look_at_conditions(backend_of: Callable[[Any], Any]) -> None:
    def known(tx: Any, variable: Any) -> torch.Tensor | None:
        if not isinstance(variable, TensorVariable):
            return None
        backend = backend_of(tx)
        # Not `in`: Inductor's own cannot be hashed.
        return known_value(variable.as_proxy().node) if any(backend is b for b in _backends) else None

    for translator in _subclasses(InstructionTranslatorBase):
        for name, number in dis.opmap.items():
            handler = getattr(translator, name, None)
            if handler is not None and name.startswith(_JUMPS) and name.endswith(_ON_TRUTH):
                table: Any = translator.dispatch_table  # type: ignore[attr-defined]
                replace_entries("jumps by a condition", table, {number: _deciding(handler, known)})
    read: Any = TensorVariable.method_item

    def read_if_unknown(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        value = known(tx, self)
        if value is None or value.numel() != 1 or args or kwargs:
            return read(self, tx, *args, **kwargs)
        return VariableTracker.build(tx, value.item())

    replace(TensorVariable, "method_item", read_if_unknown)


def _subclasses(owner: type) -> Iterator[type]:
    yield owner
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        yield from _subclasses(subclass)


def _deciding(
    jump: Callable[..., Any], known: Callable[[Any, Any], torch.Tensor | None]
) -> Callable[..., Any]:
    """A conditional jump that knows the condition, where that is a tensor of known value."""

    @functools.wraps(jump)
    def decided(self: Any, instruction: Any) -> Any:
        condition = self.stack[-1]
        value = known(self, condition)
        if value is None or value.numel() != 1:
            return jump(self, instruction)
        truth = self.stack[-1] = VariableTracker.build(self, bool(value))
        result = jump(self, instruction)
        if self.stack and self.stack[-1] is truth:  # as `a or b` leaves `a`
            self.stack[-1] = condition
        return result

    return decided


def known_value(node: Node) -> torch.Tensor | None:
    """The value of a node of Dynamo's graph that depends on no data; None for others.

    Sizes that it depends on are guarded if it is returned.
    """
    nodes = _made_of(node)
    if nodes is None or _may_be_written(nodes):
        return None
    try:
        sizes = {n: int(n.meta["example_value"]) for n in nodes if is_size(n.meta["example_value"])}
        with without_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), _Repeatable():  # type: ignore[no-untyped-call]
            return _computed(nodes, sizes)
    except Exception:
        return None  # it is read at run time, where eager's error is the user's


def _made_of(node: Node) -> list[Node] | None:
    """The nodes that a node is computed from, in order; None if these are not only sizes and constants."""
    found: dict[Node, None] = {}
    ahead = [node]
    while ahead:
        each = ahead.pop()
        if each in found:
            continue
        value = each.meta.get("example_value")
        found[each] = None
        if is_size(value):
            continue  # known by itself, whatever it is the size of
        discrete = isinstance(value, torch.Tensor) and _is_discrete(value)
        computed = each.op == "call_method" or (each.op == "call_function" and _is_known(each.target))
        if not discrete or not computed or len(found) > _MOST_NODES:
            return None
        ahead += each.all_input_nodes
    return sorted(found)


def _is_discrete(value: torch.Tensor) -> bool:
    """Whether a tensor holds integers or truth values, not too many, and no write to it was counted."""
    kind = value.dtype
    return (
        not (kind.is_floating_point or kind.is_complex)
        and type(value) is FakeTensor
        and value.layout is torch.strided
        and value._version == 0
        and all(is_size(size) or size <= _MOST_ELEMENTS for size in value.shape)
    )


def _may_be_written(nodes: list[Node]) -> bool:
    """Whether anything in the graph may write to the memory of some nodes, also through a view or an alias.

    Version counts miss some writes, as through ``x.data``. A function may write unless it is one of PyTorch's
    or Python's that is known not to.
    """
    storages = {key for node in nodes if (key := _storage(node)) is not None}
    return any(
        any(_storage(read) in storages for read in node.all_input_nodes) and not _only_reads(node)
        for node in nodes[0].graph.nodes
        if node.op != "output"
    )


def _storage(node: Node) -> int | None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_key(value)


def _only_reads(node: Node) -> bool:
    if node.kwargs.get("out") is not None:
        return False
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    target: Any = node.target
    if node.op != "call_function" or target in _WRITES or not _is_known(target):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    return not target.__name__.endswith("_") and not _told_to_write(node)


def _is_known(target: Any) -> bool:
    """Whether a function is PyTorch's or Python's: a user's may do, and remember, anything."""
    if isinstance(target, torch._ops.OpOverload):
        return not is_foreign(target)
    module = str(getattr(target, "__module__", None) or "torch")  # what C++ defines has none
    ours = module.partition(".")[0] in ("torch", "_operator", "math", "builtins")
    return ours and isinstance(target, _FUNCTIONS)


def _told_to_write(node: Node) -> bool:
    """Whether an argument says that a function is to write in place, as ``relu(x, inplace=True)``."""
    if not isinstance(node.target, types.FunctionType):
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return True
    return given.get("inplace", False) is not False


def _computed(nodes: list[Node], sizes: dict[Node, int]) -> torch.Tensor | None:
    values: dict[Node, Any] = dict(sizes)
    for node in nodes:
        if node in values:
            continue
        args: Any = _on_cpu(map_arg(node.args, values.__getitem__))
        kwargs: Any = _on_cpu(map_arg(node.kwargs, values.__getitem__))
        of_first = node.op == "call_method"
        function: Any = getattr(args[0], str(node.target)) if of_first else node.target
        value = values[node] = function(*args[of_first:], **kwargs)
        if not isinstance(value, torch.Tensor) or value.numel() > _MOST_ELEMENTS:
            return None
    result = values[nodes[-1]]
    return result if isinstance(result, torch.Tensor) else None


def _on_cpu(given: Any) -> Any:
    """Arguments of a call in which no other device is asked for."""
    return torch.utils._pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), given)


class _NotRepeatableError(Exception):
    """An operation whose result may differ between calls."""


class _Repeatable(TorchDispatchMode):
    """Refuses operations that draw random numbers, leave memory as they find it, or write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_of_nothing = "empty" in func.__name__
        if made_of_nothing or torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _NotRepeatableError(str(func))
        return func(*args, **(kwargs or {}))
