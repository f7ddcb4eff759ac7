"""The planner's own operators for backwards that read no element of their second argument, ``self``.

PyTorch's read only its sizes and memory format, and yet it has to be kept for them. Ours are given something
small instead, and pass the result, which has the same sizes and format, to the kernel as ``self``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

SizesAndFormat = tuple[Any, torch.memory_format]
"""The sizes of a result, and its memory format."""

_library = torch.library.Library("planner", "FRAGMENT")


def memory_format(value: torch.Tensor) -> torch.memory_format:
    """The memory format in which kernels that keep it return their results."""
    return suggest_memory_format(value)


def given_instead(
    operator: Any, argument: str, sizes_and_format: Callable[..., SizesAndFormat]
) -> tuple[Any, Callable[..., Any]]:
    """Define ``planner::name``, which is given another argument in the place of ``self`` of ``aten::name``.

    Args:
        operator: A backward that is given a gradient and ``self``, and has an overload that writes its result
            into a tensor, ``grad_input``.
        argument: The argument given instead of ``self``, as in a schema.
        sizes_and_format: Given the arguments of the new operator, the sizes and memory format of its result.

    Returns:
        The new operator, and the function that it runs, which can be called without the dispatcher.
    """
    writing, name = operator.overloadpacket.grad_input, operator.overloadpacket.__name__

    def backward(gradient: torch.Tensor, given: Any, *rest: Any) -> torch.Tensor:
        sizes, format_ = sizes_and_format(gradient, given, *rest)
        result = torch.empty(sizes, dtype=gradient.dtype, device=gradient.device, memory_format=format_)
        returned: torch.Tensor = writing(gradient, result, *rest, grad_input=result)
        return returned

    schema = str(operator._schema).removeprefix("aten::")
    _library.define(schema.replace("Tensor self", argument))
    _library.impl(name, backward, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default, backward
