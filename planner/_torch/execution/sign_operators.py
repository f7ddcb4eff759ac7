"""The planner's own operators on results of ReLU: pack a bit for each element, and run the backward by it.

ReLU's backward reads only which elements of the result are above zero, or NaN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from planner.errors import warn

aten = torch.ops.aten

_CHUNK = 1 << 18
"""Elements that are compared at once: they stay in a core's cache."""


def pack_signs(result: torch.Tensor) -> torch.Tensor:
    """Pack a bit for each element of a result of ReLU, 1 if it is not zero: eight a byte, in one dimension.

    If the result is not contiguous, unlike in the plan, booleans are returned instead, with a warning.
    """
    if not result.is_contiguous():
        warn(
            "a result of ReLU does not lie in memory as it did when the plan was made, and its signs are "
            "kept as bytes, not as bits: the step may take more than predicted. Plan it again"
        )
        return result.ne(0)
    count = result.numel()
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=result.device)
    flat, bits = _array(result), packed.numpy()
    found = np.empty(min(count, _CHUNK), dtype=bool)
    for start in range(0, count, _CHUNK):
        part = flat[start : start + _CHUNK]
        if part.dtype == np.int16:
            part = part << 1  # half precision as integers: NumPy compares those many at once
        np.not_equal(part, 0, out=found[: len(part)])
        bits[start // 8 : (start + len(part) + 7) // 8] = np.packbits(found[: len(part)], bitorder="little")
    return packed


def mask_gradient(gradient: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The backward of ReLU.

    Args:
        gradient: The gradient of its result.
        signs: The result of :func:`pack_signs` for its result.
    """
    return _masked(gradient, signs, None)


def mask_gradient_(gradient: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The same, written into the gradient."""
    return _masked(gradient, signs, gradient)


def _masked(gradient: torch.Tensor, signs: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    count = gradient.numel()
    if signs.dtype is torch.bool or not gradient.is_contiguous():
        if signs.dtype is not torch.bool:
            unpacked = np.unpackbits(signs.numpy(), bitorder="little", count=count)
            signs = torch.from_numpy(unpacked).view(gradient.shape)
        result: torch.Tensor = aten.threshold_backward(gradient, signs.to(gradient.dtype), 0)
        return result if into is None else into.copy_(result)
    result = torch.empty_like(gradient) if into is None else into
    given, made, bits = gradient.view(-1), result.view(-1), signs.numpy()
    like_result = torch.empty(min(count, _CHUNK), dtype=gradient.dtype, device=gradient.device)
    for start in range(0, count, _CHUNK):
        part = given[start : start + _CHUNK]
        length = len(part)
        unpacked = np.unpackbits(
            bits[start // 8 : (start + length + 7) // 8], bitorder="little", count=length
        )
        above = like_result[:length].copy_(torch.from_numpy(unpacked))
        aten.threshold_backward.grad_input(part, above, 0, grad_input=made[start : start + length])
    return result


def _array(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().view(-1)
    return (flat.view(torch.int16) if flat.element_size() == 2 else flat).numpy()


_library = torch.library.Library("planner", "FRAGMENT")


def _defined(schema: str, function: Callable[..., Any]) -> Any:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default


PACK_SIGNS = _defined("pack_signs(Tensor result) -> Tensor", pack_signs)
MASK_GRADIENT = _defined("mask_gradient(Tensor gradient, Tensor signs) -> Tensor", mask_gradient)
MASK_GRADIENT_ = _defined("mask_gradient_(Tensor(a!) gradient, Tensor signs) -> Tensor(a!)", mask_gradient_)

FUNCTIONS: dict[Any, Callable[..., Any]] = {PACK_SIGNS: pack_signs, MASK_GRADIENT: mask_gradient}
"""By operator: the function that emitted code calls instead, without the dispatcher."""
