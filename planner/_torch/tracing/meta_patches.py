"""Shape functions of PyTorch that tell other shapes or layouts than the kernels make."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import _meta_registrations
from torch._decomp import decomposition_table
from torch._prims_common import (
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch import compat
from planner._torch.fake import strides_of_view
from planner._torch.operators import SHAPE_VIEWS, not_asked_for
from planner._torch.tensors import format_of_batch_norm_gradient
from planner._torch.tracing.elementwise_strides import ELEMENTWISE, Form, strides_of_elementwise


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

    compat.replace(_meta_registrations, "_meta_grouped_mm_common", shape)


Layout = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""A result, given the arguments, with the strides of the kernel's."""


def _contiguous(result: torch.Tensor, _: tuple[Any, ...]) -> torch.Tensor:
    return _new(result, torch.contiguous_format)


def _suggested_by(position: int) -> Layout:
    """Contiguous, or channels-last where this argument is."""
    return lambda result, args: (
        _new(result, suggest_memory_format(args[position]))
        if result.dim() == args[position].dim()
        else result
    )


def _made_contiguous(position: int) -> Layout:
    """As this argument, where it is contiguous or channels-last, whatever the strides of single elements."""

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        source = args[position]
        if result.shape != source.shape:
            return result
        memory_format = suggest_memory_format(source)
        if source.is_contiguous(memory_format=memory_format):
            return _strided(result, source.stride())
        return _new(result, memory_format)

    return laid_out


def _normalised_as(*positions: int) -> Layout:
    """Contiguous, or channels-last where the last of these arguments is, as batch normalisations see it.

    One can be both, where dimensions have one element. It is then taken for contiguous, if it is dense and
    all of these arguments suggest the same format.
    """

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        sources = [args[position] for position in positions]
        if result.shape != sources[-1].shape:
            return result
        dense = [*map(_dense_format, sources)]
        suggested = [*map(suggest_memory_format, sources)]
        agreed = None not in dense and len(set(suggested)) == 1
        return _new(result, dense[-1] if agreed and dense[-1] is not None else suggested[-1])

    return laid_out


def _dense_format(tensor: torch.Tensor) -> torch.memory_format | None:
    formats = (torch.contiguous_format, *_CHANNELS_LAST.get(tensor.dim(), ()))
    return next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)


_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def _normalised_backward(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    found = format_of_batch_norm_gradient(args[0], args[1], args[7])
    if result.shape != args[1].shape:
        return result
    return _strided(result, args[1].stride()) if found is torch.preserve_format else _new(result, found)


def _like(position: int) -> Layout:
    """As what is made like this argument."""

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        source = args[position]
        if result.shape != source.shape:
            return result
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(source)
        return _strided(result, source.stride() if dense else torch.empty_like(source).stride())

    return laid_out


def _element_by_element(operator: Any) -> Layout:
    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        strides = _elementwise(operator, args)
        return result if strides is None else _strided(result, strides)

    return laid_out


def _new(result: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """A result with the strides of a new tensor."""
    if not all(isinstance(size, int) for size in result.shape):
        return result.contiguous(memory_format=memory_format)
    contiguous = memory_format is torch.contiguous_format
    strides = make_contiguous_strides_for if contiguous else make_channels_last_strides_for
    return _strided(result, strides(result.shape))


def _strided(result: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    if tuple(strides) == result.stride():
        return result
    made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return made.copy_(result)


_LAYOUTS: dict[Any, Layout] = {
    getattr(torch.ops.aten, name).default: layout
    for layout, names in (
        (
            _normalised_as(0),
            (
                *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
                *("_batch_norm_with_update", "_batch_norm_with_update_functional"),
            ),
        ),
        (_normalised_as(0, 1), ("native_batch_norm_backward", "batch_norm_backward")),
        (
            _suggested_by(0),
            (
                *("native_group_norm", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
                "roll",
            ),
        ),
        (_suggested_by(1), ("reflection_pad2d_backward", "replication_pad2d_backward")),
        (
            _made_contiguous(1) if compat.version() >= (2, 14) else _suggested_by(1),
            ("native_group_norm_backward",),
        ),
        (
            _contiguous,
            (
                *("native_layer_norm", "native_layer_norm_backward", "_log_softmax", "log_sigmoid_forward"),
                *("_log_softmax_backward_data", "_fused_rms_norm", "_fused_rms_norm_backward"),
                *("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "tril", "triu"),
            ),
        ),
        (
            _like(0),
            (
                *("empty_like", "full_like", "zeros_like", "ones_like", "rand_like", "randn_like"),
                *("flip", "hardtanh", "nan_to_num", "_prelu_kernel", "log_sigmoid_backward"),
            ),
        ),
        (_like(1), ("binary_cross_entropy_backward", "nll_loss2d_backward", "_prelu_kernel_backward")),
    )
    for name in names
} | {torch.ops.aten._native_batch_norm_legit.no_stats: _normalised_as(0)}
_LAYOUTS |= dict.fromkeys((torch.ops.aten.masked_fill.Scalar, torch.ops.aten.masked_fill.Tensor), _contiguous)
_LAYOUTS |= {operator: _element_by_element(operator) for operator in ELEMENTWISE}

_ON_CUDA: dict[Any, Layout] = {
    torch.ops.aten.roll.default: _contiguous,
    torch.ops.aten.native_group_norm.default: _contiguous,
    torch.ops.aten.native_dropout_backward.default: _suggested_by(0),
    torch.ops.aten.native_batch_norm_backward.default: _normalised_backward,
}
"""Layouts of CUDA's kernels where they differ from the CPU's."""

_UNKNOWN_ON_CUDA = {getattr(torch.ops.aten, name).default for name in (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_backward",
    "native_group_norm_backward", "reflection_pad2d_backward",
    "replication_pad2d_backward", "log_sigmoid_forward",
)}  # fmt: skip
"""Operators of which CUDA's kernels are taken to give the strides that PyTorch says."""

_REMEMBERED: dict[Any, Any] = {}
"""What is remembered of calls without data under these layouts, apart from what PyTorch remembers."""
_REMEMBERED_OF_CUDA: dict[object, dict[Any, Any]] = {}
"""The same where the CPU stands for CUDA, by kind of device."""


@contextlib.contextmanager
def layouts_of_kernels() -> Iterator[None]:
    """Without data, results on the CPU and on CUDA have the strides that their kernels give them.

    PyTorch's shape functions of some operators keep the order of transposed inputs where kernels do not, or
    the other way round, and then take copies of the result for views, or views for copies.
    """
    remembered = FakeTensorMode.cache
    if remembered is _REMEMBERED or _corrections_of_cuda is not None:
        yield
        return
    known = {
        operator: decomposition_table[operator] for operator in _LAYOUTS.keys() & decomposition_table.keys()
    }
    views = {operator: op_implementations_dict[operator] for operator in SHAPE_VIEWS}
    before = {operator: op_implementations_dict.get(operator) for operator in _LAYOUTS}
    decomposition_table.update({op: _decomposed(op, shapes, _LAYOUTS[op]) for op, shapes in known.items()})
    op_implementations_dict.update({op: _as_viewed(shapes) for op, shapes in views.items()})
    op_implementations_dict.update({op: _implemented(own, _LAYOUTS[op]) for op, own in before.items()})
    FakeTensorMode.cache = _REMEMBERED
    try:
        yield
    finally:
        decomposition_table.update(known)
        op_implementations_dict.update(views)
        for operator, own in before.items():
            if own is None:
                del op_implementations_dict[operator]
            else:
                op_implementations_dict[operator] = own
        FakeTensorMode.cache = remembered


Correction = Callable[[Any, tuple[Any, ...]], Any]
"""The results of an operator, given what PyTorch says without data, and the arguments."""

_corrections_of_cuda: Mapping[Any, Correction] | None = None


@contextlib.contextmanager
def cpu_stands_for_cuda(corrections: Mapping[Any, Correction], kind: object) -> Iterator[None]:
    """Within this, inside of :func:`layouts_of_kernels`, tensors without data on the CPU stand for some on a
    CUDA device, and have their layouts.

    Args:
        corrections: By operator, what corrects its results where PyTorch asks for the device to tell them.
            All of them must be operators whose layouts on the CPU are corrected too.
        kind: What else the layouts depend on.
    """
    global _corrections_of_cuda
    before = FakeTensorMode.cache, _corrections_of_cuda
    FakeTensorMode.cache, _corrections_of_cuda = _REMEMBERED_OF_CUDA.setdefault(kind, {}), corrections
    try:
        yield
    finally:
        FakeTensorMode.cache, _corrections_of_cuda = before


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


def _elementwise(operator: Any, args: Sequence[Any]) -> tuple[int, ...] | None:
    """The strides of a result that is computed element by element; None if PyTorch tells them right."""
    forms: list[Form] = []
    for position in ELEMENTWISE[operator]:
        operand = args[position]
        if not isinstance(operand, torch.Tensor):
            forms.append(((), ()))
            continue
        form = tuple(operand.shape), operand.stride()
        if operand.device.type not in ("cpu", "cuda") or not all(
            isinstance(n, int) and n > 0 for n in form[0]
        ):
            return None
        if operand.layout is not torch.strided or not all(isinstance(n, int) for n in form[1]):
            return None
        forms.append(form)
    sizes, strides = forms[0]
    if 1 not in sizes and strides == make_contiguous_strides_for(sizes) and len(set(forms)) == 1:
        return None
    return strides_of_elementwise(forms)


def _implemented(own: Callable[..., Any] | None, layout: Layout) -> Callable[..., Any]:
    """A shape function: PyTorch's own, if it has one of this operator, or what it computes without data."""

    def run(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
        right = operator in ELEMENTWISE and _elementwise(operator, args) is None
        if _UNDERWAY.operator is operator or right:
            return NotImplemented if own is None else own(mode, operator, *args, **kwargs)
        with mode:
            return _underway(operator, _laid_out(operator, operator, layout), args, kwargs)

    return run


def _decomposed(operator: Any, shapes: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """The same of a decomposition, by which results at symbolic sizes are computed."""

    @functools.wraps(shapes)  # only what says that it is of PyTorch is used
    def run(*args: Any, **kwargs: Any) -> Any:
        if _UNDERWAY.operator is operator:
            return shapes(*args, **kwargs)
        return _underway(operator, _laid_out(operator, shapes, layout), args, kwargs)

    return run


def _underway(operator: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function in which this operator's results have PyTorch's layout: a layout may ask for that."""
    before, _UNDERWAY.operator = _UNDERWAY.operator, operator
    try:
        return function(*args, **kwargs)
    finally:
        _UNDERWAY.operator = before


class _Underway(threading.local):
    """The operator whose result is being laid out in this thread, which PyTorch is asked for as it is."""

    operator: Any = None


_UNDERWAY = _Underway()

_STATISTICS = ("native_group_norm", "native_layer_norm", "batch_norm")
"""Names of normalisations, which return statistics behind their result, contain one of these."""


def _typed(operator: Any, results: Any, args: tuple[Any, ...]) -> Any:
    """The results of a normalisation in half precision with parameters in single precision, in the types of
    the CPU's kernels: statistics are in single precision, and the gradient of what was normalised is not."""
    name = operator.overloadpacket.__name__
    if not any(part in name for part in _STATISTICS) or not isinstance(results, tuple | list):
        return results
    given = [a for a in args if isinstance(a, torch.Tensor)]
    halves = {torch.bfloat16, torch.float16} & {a.dtype for a in given}
    if not halves or all(a.dtype is not torch.float32 for a in given) or given[0].device.type != "cpu":
        return results
    typed = [given[0].dtype] if name.endswith("backward") else [results[0].dtype, *[torch.float32] * 2]
    changed = [
        result.new_empty_strided(result.shape, result.stride(), dtype=dtype)
        if result is not None and result.dtype is not dtype
        else result
        for result, dtype in zip(results, typed, strict=False)
    ]
    return (*changed, *results[len(changed) :])


def _layout_on(device: torch.device, operator: Any, layout: Layout) -> Layout:
    """The layout of a result on a device, given that on the CPU."""
    if device.type == "cpu" and _corrections_of_cuda is None:
        return layout
    if device.type not in ("cpu", "cuda") or operator in _UNKNOWN_ON_CUDA:
        return lambda result, _: result
    return _ON_CUDA.get(operator, layout)


def _laid_out(operator: Any, shapes: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        results = shapes(*args, **kwargs)
        if _corrections_of_cuda is None:
            results = _typed(operator, results, args)
        elif (correct := _corrections_of_cuda.get(operator)) is not None:
            results = correct(results, args)
        if kwargs.get("memory_format") not in (None, torch.preserve_format):
            return results
        one, unwanted = isinstance(results, torch.Tensor), not_asked_for(operator, args)
        made = (results,) if one else [None if i in unwanted else r for i, r in enumerate(results)]
        laid_out = tuple(
            result if result is None else _layout_on(result.device, operator, layout)(result, args)
            for result in made
        )
        return laid_out[0] if one else laid_out

    return run
