"""The planner's own operators of max-pooling: backwards that are given sizes.

PyTorch's are given what was pooled. Of that they read nothing but its sizes and its memory format, and yet it
has to be kept. Here the memory of the result stands for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def memory_format(value: torch.Tensor) -> torch.memory_format:
    """The memory format in which kernels that keep it return their results."""
    return suggest_memory_format(value)


_library = torch.library.Library("planner", "FRAGMENT")


def _given_sizes(operator: Any) -> tuple[Any, Callable[..., Any]]:
    """The operator that is given sizes in the place of another's second argument, and its function."""
    into, name = operator.overloadpacket.grad_input, operator.overloadpacket.__name__

    def backward(gradient: torch.Tensor, sizes: list[int], *rest: Any) -> torch.Tensor:
        # Pooling returns indices in the memory format of what it pooled.
        result = torch.empty(
            sizes, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format(rest[-1])
        )
        returned: torch.Tensor = into(gradient, result, *rest, grad_input=result)
        return returned

    schema = str(operator._schema).removeprefix("aten::")
    _library.define(schema.replace("Tensor self", "SymInt[] sizes"))
    _library.impl(name, backward, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default, backward


_OWN = {
    operator: _given_sizes(operator)
    for operator in (
        aten.max_pool2d_with_indices_backward.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
    )
}

GIVEN_SIZES: dict[Any, Any] = {operator: own for operator, (own, _) in _OWN.items()}
"""Backwards of max-pooling, and for each the operator that is given sizes in the place of what was pooled.
The last argument of each is the indices of the maxima."""

GIVEN_TENSORS: dict[Any, Any] = {own: operator for operator, own in GIVEN_SIZES.items()}
"""The same, the other way round."""

FUNCTIONS: dict[Any, Callable[..., Any]] = dict(_OWN.values())
"""What emitted code calls in the place of each, without a dispatcher between."""
