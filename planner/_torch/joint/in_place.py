"""Functionalisation: refuse writes in place whose traced results have other strides.

AOTAutograd traces ``a.sigmoid_()`` as ``sigmoid(a)``, a tensor of its own, which is contiguous where ``a``
was a part of a larger tensor (a chunk of a recurrent cell's gates). Kernels take other paths for it, in the
backward too, and some (``normal_``) even draw other numbers. No graph follows such a step.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from planner._torch.autograd import InfrastructureMode
from planner._torch.execution.op_bindings import is_row_by_row, same_steps
from planner._torch.operators import OpOverload, uses_generator
from planner._torch.patches import replaced
from planner.errors import CaptureError

_MOVES = frozenset({
    "aten::copy_", "aten::fill_", "aten::zero_", "aten::index_put_", "aten::_index_put_impl_", "aten::put_",
    "aten::index_copy_", "aten::index_fill_", "aten::masked_scatter_", "aten::tril_", "aten::triu_",
})  # fmt: skip
"""Writes that compute nothing: their values are the same wherever the result lies."""

_ROUND_COMPLEX_OTHERWISE = frozenset({"aten::addr_"})
"""Writes that round complex numbers otherwise than their functional forms, though the results lie alike."""


@contextlib.contextmanager
def results_in_place() -> Iterator[None]:
    """A context for tracing, in which results of writes in place lie as the tensor that is written to.

    Raises:
        CaptureError: The functional form of a write has other strides.
    """
    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = _written(func, args)
        with _Watch(func, written) if written else contextlib.nullcontext():
            return original(self, func, types, args, kwargs)

    with replaced(FunctionalTensorMode, {"__torch_dispatch__": dispatch}):
        try:
            yield
        except CaptureError as error:
            error.args = (str(error).partition("\n")[0],)  # torch.fx adds what it was executing
            raise


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
    """Watches the functional form of one write in place."""

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
        # Tensors whose values are known are masks and indices: these are read alike wherever they lie.
        if not alike and all(isinstance(r, FakeTensor) and r.constant is None for r in results):
            sizes = ", ".join("x".join(map(str, tensor.shape)) for tensor in given)
            raise CaptureError(
                f"{self._func} writes in place to a tensor ({sizes}) that lies in a larger one, or has no "
                "order of rows, and a graph would compute or draw other numbers. Plan with backend='replay', "
                "or leave backend= out: the plan then follows the step as it is written. Or write to a copy "
                "(y = y.sigmoid(), not y.sigmoid_())"
            )
        return result

    def _lies_alike(self, result: torch.Tensor, written: torch.Tensor) -> bool:
        if result.is_complex() and self._func._schema.name in _ROUND_COMPLEX_OTHERWISE:
            return False
        # For other operators PyTorch's shape functions may give other strides than the kernel (`uniform`).
        alike = _element_by_element(self._func) or is_row_by_row(written)
        return alike and same_steps(result, written)
