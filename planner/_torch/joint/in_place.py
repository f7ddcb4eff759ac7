"""Functionalisation: find writes in place whose traced results have other strides."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_meta,
    track_tensor,
)

from planner._torch.autograd import InfrastructureMode
from planner._torch.execution.op_bindings import is_row_by_row, same_steps
from planner._torch.operators import OpOverload, uses_generator
from planner._torch.patches import replaced

IN_PLACE_OPERATOR = "planner_in_place"
"""Key in a node's ``meta``: the operator that writes in place."""

_MOVES = frozenset({
    "aten::copy_", "aten::fill_", "aten::zero_", "aten::index_put_", "aten::_index_put_impl_", "aten::put_",
    "aten::index_copy_", "aten::index_fill_", "aten::masked_scatter_", "aten::tril_", "aten::triu_",
})  # fmt: skip
"""Writes that compute nothing: their values are the same wherever the result lies."""

_ROUND_COMPLEX_OTHERWISE = frozenset({"aten::addr_"})
"""Writes that round complex numbers otherwise than their functional forms, though the results lie alike."""


@contextlib.contextmanager
def results_in_place() -> Iterator[None]:
    """A context for tracing: results of writes in place have the strides of the tensor that is written to.

    The nodes whose functional forms have other strides are marked, see :mod:`planner.graph.in_place`.
    """
    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = _written(func, args)
        with _Watch(func, written) if written else contextlib.nullcontext():
            return original(self, func, types, args, kwargs)

    with replaced(FunctionalTensorMode, {"__torch_dispatch__": dispatch}):
        yield


def _written(func: Any, args: tuple[Any, ...]) -> Sequence[Any]:
    """The tensors that an operator writes to in place, where another layout of the result may be seen."""
    if not isinstance(func, OpOverload) or not args or not func._schema.name.endswith("_"):
        return ()
    if torch.Tag.inplace_view in func.tags:
        return ()  # `transpose_`, `squeeze_`: nothing is written, the tensor becomes another view
    first = func._schema.arguments[0].alias_info
    if first is None or not first.is_write:
        return ()
    tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    if not tensors or not all(type(t) is FunctionalTensor and t.layout is torch.strided for t in tensors):
        return ()
    if (_element_by_element(func) or func._schema.name in _MOVES) and all(map(_looks_at_rows, tensors)):
        return ()
    return tensors


def _looks_at_rows(tensor: Any) -> bool:
    """Whether a tensor is a view whose base stays contiguous when it is written through the view."""
    base = tensor._base if tensor._is_view() else None
    return type(base) is FunctionalTensor and is_row_by_row(torch._from_functional_tensor(base.elem))


def _element_by_element(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags and not uses_generator(func)


class _Watch(InfrastructureMode):
    """Watches the functional form of one write in place, and gives its results the right strides."""

    def __init__(self, func: OpOverload, written: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._func, self._seen = func, False
        self._written = [t.from_functional() for t in written]
        name = func._schema.name.removesuffix("_")
        self._twins = {name, f"{name}_functional"}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._seen or not isinstance(func, OpOverload) or func._schema.name not in self._twins:
            return result
        given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        results = result if isinstance(result, list | tuple) else [result]
        if len(results) != len(self._written) or any(
            a is not b for a, b in zip(given, self._written, strict=True)
        ):
            return result
        self._seen = True
        alike = all(self._lies_alike(a, like) for a, like in zip(results, given, strict=True))
        if alike or not all(map(_can_move, results)):
            return result
        moved = _moved(results, given, self._func)
        return moved if isinstance(result, list | tuple) else moved[0]

    def _lies_alike(self, result: torch.Tensor, written: torch.Tensor) -> bool:
        if result.is_complex() and self._func._schema.name in _ROUND_COMPLEX_OTHERWISE:
            return False
        # For other operators PyTorch's shape functions may give other strides than the kernel (`uniform`).
        alike = _element_by_element(self._func) or is_row_by_row(written)
        return alike and result.dtype is written.dtype and same_steps(result, written)


def _can_move(result: Any) -> bool:
    # Known values stay with the tensor that they are the values of.
    return isinstance(result, FakeTensor) and result.constant is None


def _moved(results: Sequence[torch.Tensor], written: Sequence[torch.Tensor], func: OpOverload) -> list[Any]:
    """Tensors without data in the place of others, as the results of the same node of a trace."""
    with disable_proxy_modes_tracing():
        moved = [laid_out_like(tensor) for tensor in written]
    mode = get_proxy_mode()
    if mode is None:
        return moved
    nodes = []
    for result, tensor in zip(results, moved, strict=True):
        proxy = get_proxy_slot(result, mode.tracer).proxy
        set_meta(proxy, tensor)
        track_tensor(tensor, proxy, constant=None, tracer=mode.tracer)
        nodes.append(proxy.node)
    if isinstance(nodes[0].target, OpOverload):
        mark(nodes[0], func)
    else:  # members of a list
        call = nodes[0].all_input_nodes[0]
        call.meta["val"] = [node.meta["val"] for node in nodes]
        mark(call, func)
    return moved


def mark(node: Node, operator: Any) -> None:
    """Let a node run as a write in place by ``operator``, which takes the arguments that the node has."""
    node.meta[IN_PLACE_OPERATOR] = operator


def laid_out_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
