"""Dropout's noise, and masks, as bits.

Eager's dropout on the CPU saves its noise, a tensor of zeros and of one other number, as large as what it
drops: with bits in its place a thirty-second of it is kept, and no number is drawn again. Noise and booleans
are packed as they lie in memory, in the order of their storage.
"""

import functools
from typing import Any

import torch

from planner._torch import fake
from planner._torch.execution.mask_operators import pack_bits

_CHUNK = 1 << 18
"""Elements that are packed or unpacked at once: as much as stays in a core's cache."""

_SUMMED = frozenset({torch.float32, torch.float64})
"""Types in which sums of eight such numbers are exact to less than a half."""


def pack(mask: torch.Tensor, kept: float) -> torch.Tensor:
    """Which elements of a mask, or of dropout's noise, are not zero, as bits in the order of its memory.

    Args:
        mask: A tensor that fills its storage.
        kept: What those of its elements are that are not zero.
    """
    count = mask.numel()
    flat = mask.as_strided((count,), (1,))
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=mask.device)
    weights = None
    if mask.dtype in _SUMMED:  # a byte is the sum of the powers of two at which elements are not zero
        weights = torch.tensor([2.0**i / kept for i in range(8)], dtype=mask.dtype, device=mask.device)
    for start in range(0, count, _CHUNK):
        part = flat[start : start + _CHUNK]
        if weights is not None and len(part) % 8 == 0:
            bits = torch.mv(part.view(-1, 8), weights).round_()
        else:
            bits = pack_bits(part if part.dtype is torch.bool else part.ne(0))
        packed[start // 8 : start // 8 + len(bits)].copy_(bits)
    return packed


def unpack(packed: torch.Tensor, count: int, dtype: torch.dtype, kept: float) -> torch.Tensor:
    """The elements that :func:`pack` packed, in one dimension.

    Args:
        packed: Their bits.
        count: How many there are.
        dtype: Their type.
        kept: What those are that are not zero.
    """
    flat = torch.empty(count, dtype=dtype, device=packed.device)
    table = _bytes_of(dtype, kept, packed.device)
    whole = count // 8
    rows = flat[: 8 * whole].view(-1, 8)
    for start in range(0, whole, _CHUNK // 8):
        part = packed[start : min(whole, start + _CHUNK // 8)]
        torch.index_select(table, 0, part.int(), out=rows[start : start + len(part)])
    if count > 8 * whole:
        flat[8 * whole :] = table[int(packed[whole])][: count - 8 * whole]
    return flat


@functools.cache
def _bytes_of(dtype: torch.dtype, kept: float, device: torch.device) -> torch.Tensor:
    """For each byte the eight elements that it stands for."""
    with fake.without_modes():
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        elements = bits.to(dtype)
        return (elements if kept == 1.0 else elements.mul_(kept)).to(device)


@functools.cache
def noise_of(divisor: float, dtype: torch.dtype) -> float:
    """What dropout's noise is where it is not zero: one, divided by the probability to keep an element."""
    with fake.without_modes():
        return float(torch.ones(1, dtype=dtype).div_(divisor))


_library = torch.library.Library("planner", "FRAGMENT")


def _defined(schema: str, function: Any) -> Any:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default


PACK_NOISE = _defined("pack_noise(Tensor mask, float kept) -> Tensor", pack)
UNPACK_NOISE = _defined(
    "unpack_noise(Tensor packed, int count, ScalarType dtype, float kept) -> Tensor", unpack
)
"""For measuring what these take."""
