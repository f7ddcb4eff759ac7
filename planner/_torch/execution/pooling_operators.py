"""The planner's own operators of max-pooling: backwards that are given sizes.

PyTorch's backwards read only the sizes and the memory format of pooling's operand, but get the operand, which
has to be kept for them. These get its sizes, and pass the memory of the result to the kernel instead of the
operand.
"""

from collections.abc import Callable
from typing import Any

import torch

from planner._torch.execution.own_backwards import SizesAndFormat, given_instead, memory_format

aten = torch.ops.aten


def _sizes_and_format(_gradient: torch.Tensor, sizes: list[int], *rest: Any) -> SizesAndFormat:
    return sizes, memory_format(rest[-1])  # pooling returns indices in the memory format of its operand


_OWN = {
    operator: given_instead(operator, "SymInt[] sizes", _sizes_and_format)
    for operator in (
        aten.max_pool2d_with_indices_backward.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
    )
}

GIVEN_SIZES: dict[Any, Any] = {operator: own for operator, (own, _) in _OWN.items()}
"""Backwards of max-pooling, and for each the operator that is given sizes in place of the operand. The last
argument of each is the indices of the maxima."""

GIVEN_TENSORS: dict[Any, Any] = {own: operator for operator, own in GIVEN_SIZES.items()}
"""The same, the other way round."""

FUNCTIONS: dict[Any, Callable[..., Any]] = dict(_OWN.values())
"""By operator: the function that emitted code calls instead, without the dispatcher."""
