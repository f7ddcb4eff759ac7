"""Corrections of PyTorch's shape functions that tell other shapes or layouts than the kernels make."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import _meta_registrations
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch.fake import strides_of_view
from planner._torch.layouts.elementwise_strides import ELEMENTWISE, strides_of
from planner._torch.layouts.forms import Layout
from planner._torch.layouts.of_kernels import LAYOUTS, ON_CUDA, UNKNOWN_ON_CUDA
from planner._torch.operators import SHAPE_VIEWS, not_asked_for
from planner._torch.patches import replace, replaced, replaced_entries


@functools.cache
def widen_grouped_products() -> None:
    """Let the shape function of grouped matrix products take what their kernels take: not only bfloat16."""
    strict = getattr(_meta_registrations, "_meta_grouped_mm_common", None)  # since 2.9
    if strict is None:
        return

    def shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale_a") is not None or mat_a.dtype is torch.bfloat16:
            return strict(mat_a, mat_b, *args, **kwargs)
        return _meta_registrations._create_grouped_mm_output_tensor(
            mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype")
        )

    replace(_meta_registrations, "_meta_grouped_mm_common", shape)


_REMEMBERED: dict[Any, Any] = {}
"""A cache of calls without data under these layouts, apart from PyTorch's."""
_REMEMBERED_OF_CUDA: dict[object, dict[Any, Any]] = {}
"""The same where the CPU stands for CUDA, by kind of device."""


@contextlib.contextmanager
def layouts_of_kernels() -> Iterator[None]:
    """A context in which results without data, on the CPU and on CUDA, have the strides of their kernels.

    PyTorch's shape functions of some operators keep the order of transposed inputs where kernels do not, or
    the other way round. Later operations then take copies of the result for views, or views for copies.
    """
    remembered = FakeTensorMode.cache
    if remembered is _REMEMBERED or _corrections_of_cuda is not None:
        yield
        return
    known = {
        operator: decomposition_table[operator] for operator in LAYOUTS.keys() & decomposition_table.keys()
    }
    views = {op: op_implementations_dict[op] for op in SHAPE_VIEWS if op in op_implementations_dict}
    before = {operator: op_implementations_dict.get(operator) for operator in LAYOUTS}
    decomposed = {op: _decomposed(op, shapes, LAYOUTS[op]) for op, shapes in known.items()}
    implemented = {op: _as_viewed(shapes) for op, shapes in views.items()}
    implemented |= {op: _implemented(own, LAYOUTS[op]) for op, own in before.items()}
    with (
        replaced_entries("decompositions", decomposition_table, decomposed),
        replaced_entries("operators without data", op_implementations_dict, implemented),
        replaced(FakeTensorMode, {"cache": _REMEMBERED}),
    ):
        yield


Correction = Callable[[Any, tuple[Any, ...]], Any]
"""The results of an operator, given PyTorch's results without data, and the arguments."""

_corrections_of_cuda: Mapping[Any, Correction] | None = None


@contextlib.contextmanager
def cpu_stands_for_cuda(corrections: Mapping[Any, Correction], kind: object) -> Iterator[None]:
    """A context, inside of :func:`layouts_of_kernels`, in which tensors without data on the CPU stand for
    tensors on a CUDA device, and have their layouts.

    Args:
        corrections: By operator, the correction of its results on CUDA. All of them must be operators whose
            layouts on the CPU are corrected too.
        kind: Further facts that the layouts depend on.
    """
    global _corrections_of_cuda
    before, _corrections_of_cuda = _corrections_of_cuda, corrections
    try:
        with replaced(FakeTensorMode, {"cache": _REMEMBERED_OF_CUDA.setdefault(kind, {})}):
            yield
    finally:
        _corrections_of_cuda = before


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


def _implemented(own: Callable[..., Any] | None, layout: Layout) -> Callable[..., Any]:
    """A shape function: PyTorch's own, if it has one of this operator, or what it computes without data."""

    def run(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
        right = operator in ELEMENTWISE and strides_of(operator, args) is None
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
    """Call a function in which this operator's results have PyTorch's own layout, which a layout may need."""
    before, _UNDERWAY.operator = _UNDERWAY.operator, operator
    try:
        return function(*args, **kwargs)
    finally:
        _UNDERWAY.operator = before


class _Underway(threading.local):
    """The operator whose result is being laid out in this thread, which PyTorch is asked for as it is."""

    operator: Any = None


_UNDERWAY = _Underway()


def _layout_on(device: torch.device, operator: Any, layout: Layout) -> Layout:
    """The layout of a result on a device, given that on the CPU."""
    if device.type == "cpu" and _corrections_of_cuda is None:
        return layout
    if device.type not in ("cpu", "cuda") or operator in UNKNOWN_ON_CUDA:
        return lambda result, _: result
    return ON_CUDA.get(operator, layout)


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


_STATISTICS = ("native_group_norm", "native_layer_norm", "batch_norm")
"""Parts of names of normalisations, which return statistics after their result."""


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
