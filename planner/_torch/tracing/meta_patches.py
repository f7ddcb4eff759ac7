"""Shape functions of PyTorch that tell other shapes or layouts than the kernels make."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import _meta_registrations
from torch._decomp import decomposition_table
from torch._dispatch.python import no_python_dispatcher
from torch._prims_common import (
    compute_elementwise_output_strides,
    suggest_memory_format,
)
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch.fake import strides_of_view, without_modes
from planner._torch.tracing.dynamo_patches import replace


@functools.cache
def widen_grouped_products() -> None:
    """Let the shape function of grouped matrix products take what their kernels take: not only bfloat16."""
    strict = _meta_registrations._meta_grouped_mm_common

    def shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale_a") is not None or mat_a.dtype is torch.bfloat16:
            return strict(mat_a, mat_b, *args, **kwargs)
        return _meta_registrations._create_grouped_mm_output_tensor(
            mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype")
        )

    replace(_meta_registrations, "_meta_grouped_mm_common", shape)


Layout = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""A result, given the arguments, with the strides of the kernel's."""


def _contiguous(result: torch.Tensor, _: tuple[Any, ...]) -> torch.Tensor:
    return result.contiguous()


def _channels_last_as(position: int) -> Layout:
    """Contiguous, or channels-last where this argument is; not what has another shape."""

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        source = args[position]
        if result.shape != source.shape:
            return result
        return result.contiguous(memory_format=suggest_memory_format(source))

    return laid_out


def _like(position: int) -> Layout:
    """As what is made like this argument."""
    return lambda result, args: _strided(result, torch.empty_like(args[position]).stride())


def _elementwise(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return _strided(result, compute_elementwise_output_strides(args[0], args[1]))


def _by_operands(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Of the gradient and what decides about it, which the kernel reads in the other order."""
    strides = _strides_of_elementwise(args[1::-1])
    return result if strides is None else _strided(result, strides)


def _strides_of_elementwise(operands: Sequence[Any]) -> Sequence[int] | None:
    """The strides of what kernels make of one or two operands, element by element; None if tracing is right.

    All of them lay their results out by the same rule, the tensor iterator's. Operators whose kernel for
    tensors without data is of C++ follow it, as the one that is asked here.
    """
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    numbers = (number for tensor in tensors for number in (*tensor.shape, *tensor.stride()))
    if any(tensor.device.type != "cpu" for tensor in tensors) or not all(isinstance(n, int) for n in numbers):
        return None
    if not any(1 in tensor.shape for tensor in tensors):
        return None
    with without_modes(), no_python_dispatcher():
        without_data = [
            torch.empty_strided(o.shape, o.stride(), device="meta")
            if isinstance(o, torch.Tensor)
            else torch.empty((), device="meta")
            for o in operands
        ]
        return tuple(torch.ops.aten.silu_backward.default(without_data[0], without_data[-1]).stride())


def _strided(result: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    if tuple(strides) == result.stride():
        return result
    made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return made.copy_(result)


_LAYOUTS: dict[Any, Layout] = {
    getattr(torch.ops.aten, name).default: layout
    for layout, names in (
        (
            _channels_last_as(0),
            (
                *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
                *("_batch_norm_with_update", "_batch_norm_with_update_functional"),
            ),
        ),
        (_channels_last_as(1), ("native_batch_norm_backward", "batch_norm_backward")),
        (
            _contiguous,
            (
                *("native_layer_norm_backward", "_log_softmax_backward_data", "log_sigmoid_forward"),
                *("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"),
            ),
        ),
        (_like(1), ("binary_cross_entropy_backward",)),
        (
            _elementwise,
            ("native_dropout_backward", "hardtanh_backward", "hardswish_backward", "logit_backward"),
        ),
        (_by_operands, ("threshold_backward",)),
    )
    for name in names
} | {torch.ops.aten._native_batch_norm_legit.no_stats: _channels_last_as(0)}


_UNARY = (
    *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "erf"),
    *("tanh", "sigmoid", "relu", "silu", "gelu"),
)
_BINARY = ("tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward")

ELEMENTWISE: dict[Any, int] = {
    **{getattr(torch.ops.aten, name).default: 1 for name in _UNARY},
    **{getattr(torch.ops.aten, name).default: 2 for name in _BINARY},
    **{getattr(torch.ops.aten, name).Tensor: 2 for name in ("add", "sub", "mul", "div")},
    torch.ops.aten.pow.Tensor_Scalar: 1,
}
"""Operators that compute element by element, and of how many operands; of two, one may be a number."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

_REMEMBERED: dict[Any, Any] = {}
"""What is remembered of calls without data under these layouts, apart from what PyTorch remembers."""


@contextlib.contextmanager
def layouts_of_kernels() -> Iterator[None]:
    """Without data, results on the CPU have the strides that its kernels give them.

    PyTorch's shape functions of some operators keep the order of transposed inputs where kernels do not, or
    the other way round, and then take copies of the result for views, or views for copies.
    """
    remembered = FakeTensorMode.cache
    if remembered is _REMEMBERED:
        yield
        return
    known = {
        operator: decomposition_table[operator] for operator in _LAYOUTS.keys() & decomposition_table.keys()
    }
    views = {operator: op_implementations_dict[operator] for operator in _VIEWS}
    decomposition_table.update({op: _laid_out(shapes, _LAYOUTS[op]) for op, shapes in known.items()})
    op_implementations_dict.update({op: _as_viewed(shapes) for op, shapes in views.items()})
    op_implementations_dict.update(computed := dict.fromkeys(ELEMENTWISE, _as_operands))
    FakeTensorMode.cache = _REMEMBERED
    try:
        yield
    finally:
        decomposition_table.update(known)
        op_implementations_dict.update(views)
        for operator in computed:
            del op_implementations_dict[operator]
        FakeTensorMode.cache = remembered


def _as_viewed(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Views whose dimensions of one element have the strides of the kernel's too, by which others then choose
    how to compute."""

    @functools.wraps(shapes)
    def run(mode: FakeTensorMode, operator: Any, viewed: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        view = shapes(mode, operator, viewed, *args, **kwargs)
        numbers = (*viewed.shape, *viewed.stride(), *view.shape)
        if not all(isinstance(number, int) for number in numbers) or 1 not in view.shape:
            return view
        strides = strides_of_view(viewed.shape, viewed.stride(), view.shape)
        return view if strides == view.stride() else view.as_strided(view.shape, strides)

    return run


def _as_operands(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Results element by element, whose dimensions of one element have the strides of the kernel's."""
    strides = None if _UNDERWAY.operator else _strides_of_elementwise(args[: ELEMENTWISE[operator]])
    if strides is None:
        return NotImplemented
    _UNDERWAY.operator = operator
    try:
        with mode:
            return _strided(operator(*args, **kwargs), strides)
    finally:
        _UNDERWAY.operator = None


class _Underway(threading.local):
    """The operator whose result is being laid out in this thread, which PyTorch is asked for as it is."""

    operator: Any = None


_UNDERWAY = _Underway()


def _laid_out(shapes: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    @functools.wraps(shapes)  # only what says that it is of PyTorch is used
    def run(*args: Any, **kwargs: Any) -> Any:
        results = shapes(*args, **kwargs)
        one = isinstance(results, torch.Tensor)
        laid_out = tuple(
            result if result is None or result.device.type != "cpu" else layout(result, args)
            for result in ((results,) if one else results)
        )
        return laid_out[0] if one else laid_out

    return run
