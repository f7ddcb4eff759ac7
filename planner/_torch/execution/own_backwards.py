"""The planner's own operators in the place of backwards that read no element of their second argument.

PyTorch's are given a tensor that has to be kept though they read only its sizes and memory format. Here the
memory of the result is passed to the kernel in its place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

Laid = tuple[Any, torch.memory_format]
"""The sizes of a result, and its memory format."""

_library = torch.library.Library("planner", "FRAGMENT")


def memory_format(value: torch.Tensor) -> torch.memory_format:
    """The memory format in which kernels that keep it return their results."""
    return suggest_memory_format(value)


def given_instead(operator: Any, argument: str, laid: Callable[..., Laid]) -> tuple[Any, Callable[..., Any]]:
    """An operator that is given something else in the place of another's second argument, and its function.

    Args:
        operator: A backward that is given a gradient and ``self``, and can write its result into a tensor.
        argument: The argument given instead of ``self``, as in a schema.
        laid: Given the arguments of the new operator, the sizes and memory format of its result.
    """
    into, name = operator.overloadpacket.grad_input, operator.overloadpacket.__name__

    def backward(gradient: torch.Tensor, given: Any, *rest: Any) -> torch.Tensor:
        sizes, layout = laid(gradient, given, *rest)
        result = torch.empty(sizes, dtype=gradient.dtype, device=gradient.device, memory_format=layout)
        returned: torch.Tensor = into(gradient, result, *rest, grad_input=result)
        return returned

    schema = str(operator._schema).removeprefix("aten::")
    _library.define(schema.replace("Tensor self", argument))
    _library.impl(name, backward, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default, backward
