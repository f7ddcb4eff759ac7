"""Packs dropout's noise, and boolean masks, to bits.

Eager's dropout on the CPU saves its noise: a tensor of the input's size, of zeros and one other number. Bits
take a thirty-second of what float32 takes, and no random number is drawn again. Elements are packed in the
order of the storage, whatever the strides are.
"""

import functools
from typing import Any

import torch

from planner._torch import fake
from planner._torch.execution.mask_operators import pack_bits

_CHUNK = 1 << 18
"""Elements that are packed or unpacked at once: they stay in a core's cache."""

_SUMMED = frozenset({torch.float32, torch.float64})
"""Types that are packed by a matrix product: their rounding errors in a sum of eight terms, at most 255, stay
below a half."""


def pack(mask: torch.Tensor, nonzero: float) -> torch.Tensor:
    """Pack a mask, or dropout's noise: a bit for each element, 1 where it is not zero.

    Args:
        mask: A tensor that fills its storage.
        nonzero: The value of all its elements that are not zero.

    Returns:
        uint8, in one dimension; the lowest bit of a byte is the first element.
    """
    count = mask.numel()
    flat = mask.as_strided((count,), (1,))
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=mask.device)
    weights = None
    if mask.dtype in _SUMMED:  # a byte is the product of its eight elements with these
        weights = torch.tensor([2.0**i / nonzero for i in range(8)], dtype=mask.dtype, device=mask.device)
    for start in range(0, count, _CHUNK):
        part = flat[start : start + _CHUNK]
        if weights is not None and len(part) % 8 == 0:
            bits = torch.mv(part.view(-1, 8), weights).round_()
        else:
            bits = pack_bits(part if part.dtype is torch.bool else part.ne(0))
        packed[start // 8 : start // 8 + len(bits)].copy_(bits)
    return packed


def unpack(packed: torch.Tensor, count: int, dtype: torch.dtype, nonzero: float) -> torch.Tensor:
    """Unpack the elements that :func:`pack` packed, in one dimension.

    Args:
        packed: Their bits.
        count: Their number.
        dtype: Their type.
        nonzero: The value of those that are not zero.
    """
    flat = torch.empty(count, dtype=dtype, device=packed.device)
    table = (_on_cpu if packed.device.type == "cpu" else _on_gpu)(dtype, nonzero, packed.device)
    whole = count // 8
    rows = flat[: 8 * whole].view(-1, 8)
    for start in range(0, whole, _CHUNK // 8):
        part = packed[start : min(whole, start + _CHUNK // 8)]
        torch.index_select(table, 0, part.int(), out=rows[start : start + len(part)])
    if count > 8 * whole:
        flat[8 * whole :] = table[int(packed[whole])][: count - 8 * whole]
    return flat


def _elements_of_bytes(dtype: torch.dtype, nonzero: float, device: torch.device) -> torch.Tensor:
    """For each of the 256 bytes the eight elements that it stands for."""
    with fake.without_modes():
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        elements = bits.to(dtype)
        return (elements if nonzero == 1.0 else elements.mul_(nonzero)).to(device)


_on_cpu = functools.lru_cache(maxsize=64)(_elements_of_bytes)  # the probability may be another in each step
_on_gpu = functools.cache(_elements_of_bytes)  # recorded CUDA graphs read these for as long as they live


@functools.lru_cache(maxsize=64)
def noise_of(divisor: float, dtype: torch.dtype) -> float:
    """The value of dropout's noise where it is not zero: one, divided by the probability to keep an element,
    as ``div_`` rounds it."""
    with fake.without_modes():
        return float(torch.ones(1, dtype=dtype).div_(divisor))


_library = torch.library.Library("planner", "FRAGMENT")


def _defined(schema: str, function: Any) -> Any:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default


# Operators, as only these are measured and costed. A replayed step calls the functions.
PACK_NOISE = _defined("pack_noise(Tensor mask, float nonzero) -> Tensor", pack)
UNPACK_NOISE = _defined(
    "unpack_noise(Tensor packed, int count, ScalarType dtype, float nonzero) -> Tensor", unpack
)
