"""The planner's own operators on boolean masks: dropout in two steps, and masks packed to bits.

A boolean takes a byte. Packed, eight take one and nothing is lost: a lossless encoding as those of Gist (Jain
et al., ISCA 2018). What these operators allocate beside their results is a scratch of bounded size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from planner._torch import fake
from planner._torch.execution.bernoulli_draws import draw
from planner.errors import warn

NAMESPACE = "planner"

_CHUNK = 1 << 18
"""Elements that are packed or unpacked at once: they stay in a core's cache."""
_GATHER = 0x0102040810204080
"""A factor: times eight bytes of 0 or 1, it gives these eight bits in the highest byte of the product."""


def draw_mask(like: torch.Tensor, keep: float) -> torch.Tensor:
    """Draw which elements dropout keeps: the numbers that eager draws for its noise.

    Args:
        like: The tensor that dropout is applied to.
        keep: The probability to keep an element.
    """
    return draw(torch.empty_like(like, dtype=torch.bool), keep)


def masked_product(value: torch.Tensor, mask: torch.Tensor, keep: float) -> torch.Tensor:
    """Dropout by a mask that was drawn before, forward or backward, as eager rounds it.

    Args:
        value: The tensor that dropout is applied to, or the gradient of the result.
        mask: The result of :func:`draw_mask`.
        keep: The probability to keep an element.
    """
    noise = mask.view(torch.uint8).to(value.dtype)  # of bytes: PyTorch converts booleans one by one
    if noise.device.type == "cpu" and value.dtype in _ONES and keep > 0:
        noise.mul_(_kept(keep, value.dtype))  # zeros and ones: as if divided, in a third of the time
    else:
        noise.div_(keep)
    return noise.mul_(value) if noise.stride() == value.stride() else value.mul(noise)


@functools.cache
def _kept(keep: float, dtype: torch.dtype) -> float:
    """The factor by which eager multiplies a kept element: 1 / `keep`, rounded.

    Computed in NumPy's memory: the first step that asks for it then allocates no more than later ones.
    """
    with fake.without_modes():
        return float(torch.from_numpy(_ONES[dtype].copy()).view(dtype).div_(keep))


_ONES: dict[torch.dtype, npt.NDArray[Any]] = {
    torch.float64: np.ones(1, np.float64),
    torch.float32: np.ones(1, np.float32),
    torch.float16: np.ones(1, np.float16),
    torch.bfloat16: np.full(1, 0x3F80, np.int16),  # the bits of 1: NumPy has no bfloat16
}


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """A mask as bits, eight to a byte, in one dimension.

    One that does not lie in memory row by row, as planned masks do, is kept as it is, with a warning.
    """
    if not mask.is_contiguous() or mask.storage_offset() % 8:
        warn(
            "a mask does not lie in memory as it did when the plan was made, and is kept whole, not as bits: "
            "the step may take more than predicted. Plan it again"
        )
        return mask.clone()
    count = mask.numel()
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=mask.device)
    whole = count // 8
    flat = mask.view(-1)
    words = flat[: 8 * whole].view(torch.int64)
    scratch = torch.empty(min(whole, _CHUNK // 8), dtype=torch.int64, device=mask.device)
    for start in range(0, whole, _CHUNK // 8):
        part = words[start : start + _CHUNK // 8]
        made = scratch[: len(part)]
        torch.mul(part, _GATHER, out=made)
        packed[start : start + len(part)].copy_(made.bitwise_right_shift_(56))
    if count > 8 * whole:
        last = torch.zeros(8, dtype=torch.bool, device=mask.device)
        last[: count - 8 * whole] = flat[8 * whole :]
        packed[whole:].copy_(last.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56))
    return packed


def unpack_bits(packed: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The mask that :func:`pack_bits` packed.

    Args:
        packed: Its bits.
        sizes: Its shape.
    """
    if packed.dtype is torch.bool:
        return packed.clone()
    mask = torch.empty(sizes, dtype=torch.bool, device=packed.device)
    count = mask.numel()
    whole = count // 8
    flat = mask.view(-1)
    words = flat[: 8 * whole].view(torch.int64)
    table = _OF_BYTE if packed.device.type == "cpu" else _OF_BYTE.to(packed.device)
    for start in range(0, whole, _CHUNK // 8):
        part = packed[start : min(whole, start + _CHUNK // 8)]
        torch.index_select(table, 0, part.int(), out=words[start : start + len(part)])
    if count > 8 * whole:
        last = table[packed[whole:].int()].view(torch.bool)
        flat[8 * whole :] = last[: count - 8 * whole]
    return mask


with fake.without_modes():
    _OF_BYTE = torch.from_numpy(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        .view(np.int64)
        .ravel()
    )
    """For each byte an int64 whose eight bytes are its bits, the lowest first."""

_library = torch.library.Library(NAMESPACE, "DEF")


def _defined(schema: str, function: Callable[..., Any], *tags: torch.Tag) -> Any:
    name = _library.define(schema, tags=tags)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default


DRAW_MASK = _defined(
    "draw_mask(Tensor like, float keep) -> Tensor", draw_mask, torch.Tag.nondeterministic_seeded
)
MASKED_PRODUCT = _defined("masked_product(Tensor value, Tensor mask, float keep) -> Tensor", masked_product)
PACK_BITS = _defined("pack_bits(Tensor mask) -> Tensor", pack_bits)
UNPACK_BITS = _defined("unpack_bits(Tensor packed, SymInt[] sizes) -> Tensor", unpack_bits)

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    DRAW_MASK: draw_mask,
    MASKED_PRODUCT: masked_product,
    PACK_BITS: pack_bits,
    UNPACK_BITS: unpack_bits,
}
"""By operator: the function that emitted code calls instead, without the dispatcher."""
