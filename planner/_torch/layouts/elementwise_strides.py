"""Strides of results of element-wise operators.

Kernels of such operators lay their results out by one rule, that of PyTorch's tensor iterator (``build`` in
``aten/src/ATen/TensorIterator.cpp``). Its shape functions in Python follow it, but not where a dimension has
one element, and with the operands of some operators in another order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for

aten = torch.ops.aten

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of an operand."""

_UNARY = (
    *(
        "abs",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceil",
        "cos",
        "cosh",
        "digamma",
        "erf",
        "erfc",
    ),
    *(
        "erfinv",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "frac",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "isnan",
    ),
    *("lgamma", "log", "log10", "log1p", "log2", "logical_not", "mish", "neg", "reciprocal", "relu", "round"),
    *(
        "rsqrt",
        "sgn",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
        "trunc",
        "bitwise_not",
    ),
    *("elu", "celu", "selu", "leaky_relu", "hardshrink", "softshrink", "softplus", "threshold"),
    *(
        "clamp",
        "clamp_min",
        "clamp_max",
    ),
)
_BINARY = (
    *("tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "mish_backward"),
    *("hardsigmoid_backward", "hardswish_backward", "hardtanh_backward"),
    *("hardshrink_backward", "softshrink_backward", "softplus_backward", "logit_backward"),
    *("native_dropout_backward", "atan2", "maximum", "minimum", "fmax", "fmin", "hypot"),
    *("logaddexp", "logical_and", "logical_or", "xlogy.Tensor"),
)
_WITH_NUMBERS = ("add", "sub", "mul", "div")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


ELEMENTWISE: dict[Any, tuple[int, ...]] = {
    **{_operator(name): (0,) for name in _UNARY},
    **{_operator(name): (0, 1) for name in _BINARY},
    **{_operator(f"{name}.{kind}"): (0, 1)
       for name in (*_WITH_NUMBERS, *_COMPARED) for kind in ("Tensor", "Scalar")},
    aten.rsub.Scalar: (0, 1),
    aten.pow.Tensor_Scalar: (0,),
    aten.pow.Tensor_Tensor: (0, 1),
    aten.lerp.Scalar: (0, 1),
    aten.lerp.Tensor: (0, 1, 2),
    aten.addcmul.default: (0, 1, 2),
    aten.addcdiv.default: (0, 1, 2),
    aten.where.self: (0, 1, 2),
    aten.threshold_backward.default: (1, 0),
    aten.leaky_relu_backward.default: (1, 0),
    aten.elu_backward.default: (0, 5),
}  # fmt: skip
"""Operators that compute each element of their result of the same element of their operands: the positions of
these, in the order in which the kernel takes them. A number among them is an operand without dimensions."""


def strides_of_elementwise(operands: Sequence[Form]) -> tuple[int, ...]:
    """Strides of a new result of operands that are broadcast together.

    Args:
        operands: Sizes and strides of each.
    """
    sizes = tuple(torch.broadcast_shapes(*(sizes for sizes, _ in operands)))
    if all(each == sizes for each, _ in operands):
        strides = _of_same_form(operands)
        if strides is not None:
            return strides
    outer = [len(sizes) - len(each) for each, _ in operands]
    steps = [
        [0] * lead
        + [
            0 if own == 1 != size else step
            for own, size, step in zip(each, sizes[lead:], strides, strict=True)
        ]
        for lead, (each, strides) in zip(outer, operands, strict=True)
    ]
    order = _innermost_first(sizes, steps)
    if order == [*reversed(range(len(sizes)))]:
        return _contiguous(sizes)
    result, step = [0] * len(sizes), 1
    for dimension in order:
        result[dimension] = step
        step *= sizes[dimension]
    return tuple(result)


def _of_same_form(operands: Sequence[Form]) -> tuple[int, ...] | None:
    """The strides of the result if all operands have its sizes and lie in memory in the same usual way; else
    None."""
    without_data = [torch.empty_strided(sizes, strides, device="meta") for sizes, strides in operands]
    sizes, strides = operands[-1]
    if all(tensor.is_contiguous() for tensor in without_data):
        return _contiguous(sizes)
    if all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in without_data):
        return torch.empty(sizes, device="meta", memory_format=torch.channels_last).stride()
    if all(aten.is_non_overlapping_and_dense.default(t) for t in without_data) and all(
        strides == each for _, each in operands
    ):
        return strides
    return None


def _innermost_first(sizes: Sequence[int], steps: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions, the smallest strides first, as an insertion sort by the operands finds them."""
    order = [*reversed(range(len(sizes)))]
    for i in range(1, len(order)):
        place = i
        for before in reversed(range(i)):
            comparison = _compared(order[before], order[place], sizes, steps)
            if comparison > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif comparison < 0:
                break
    return order


def _compared(left: int, right: int, sizes: Sequence[int], steps: Sequence[Sequence[int]]) -> int:
    """Positive if one dimension must lie further out than another, negative if further in; else 0."""
    for own in steps:
        if own[left] == 0 or own[right] == 0:
            continue
        if own[left] != own[right]:
            return 1 if own[left] > own[right] else -1
        if sizes[left] > sizes[right]:
            return 1
    return 0


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(sizes, device="meta").stride()


def strides_of(operator: Any, args: Sequence[Any]) -> tuple[int, ...] | None:
    """The strides of an element-wise operator's result; None if PyTorch tells them right."""
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
