"""The planner's own operators that stand for a tensor of which only sizes and strides are read.

The backwards of average pooling and of padding are given the operand, and read no element of it. Here they
are given a tensor of its strides without elements, which the forward makes. The memory of the result is
passed to the kernel in place of the operand.
"""

from collections.abc import Callable
from typing import Any

import torch

from planner._torch.execution.own_backwards import SizesAndFormat, given_instead, memory_format

aten = torch.ops.aten

_library = torch.library.Library("planner", "FRAGMENT")


def form_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides of another, and its sizes but for the first, which is zero."""
    return value.new_empty(0).as_strided((0, *value.shape[1:]), value.stride())


def _sizes_and_format(gradient: torch.Tensor, form: torch.Tensor, *_rest: Any) -> SizesAndFormat:
    sizes = (gradient.shape[0], *form.shape[1:])
    return sizes, memory_format(torch.empty_strided(sizes, form.stride(), device="meta"))


_library.define("form_of(Tensor value) -> Tensor")
_library.impl("form_of", form_of, "CompositeExplicitAutograd")
FORM_OF = torch.ops.planner.form_of.default

_OWN = {
    operator: given_instead(operator, "Tensor form", _sizes_and_format)
    for operator in (
        aten.avg_pool2d_backward.default,
        *(
            getattr(aten, f"{kind}_pad{dimensions}d_backward").default
            for kind in ("reflection", "replication")
            for dimensions in (1, 2, 3)
        ),
    )
}

GIVEN_FORMS: dict[Any, Any] = {operator: own for operator, (own, _) in _OWN.items()}
"""Backwards of average pooling and padding, and for each the operator that is given a form."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {FORM_OF: form_of, **dict(_OWN.values())}
"""By operator: the function that emitted code calls instead, without the dispatcher."""
