"""Shape functions of PyTorch that tell other shapes or layouts than the kernels make."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import _meta_registrations
from torch._decomp import decomposition_table
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch.fake import strides_of_view
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
    )
    for name in names
} | {torch.ops.aten._native_batch_norm_legit.no_stats: _channels_last_as(0)}


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
    FakeTensorMode.cache = _REMEMBERED
    try:
        yield
    finally:
        decomposition_table.update(known)
        op_implementations_dict.update(views)
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
