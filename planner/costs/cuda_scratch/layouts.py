"""Sizes and strides of a call's tensors as plain numbers, and the bytes of copies of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from planner._torch.fake import concrete_size
from planner.costs.devices import CUDA_ROUNDING_BYTES

HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor without its data.

    Attributes:
        sizes, strides: In elements.
        dtype: Of its elements.
        offset: Elements before its first in its storage.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def bytes(self) -> int:
        """What a dense copy takes, as it is allocated."""
        return allocated(self.elements, self.dtype)

    @property
    def contiguous(self) -> bool:
        return _dense(self.sizes, self.strides, range(len(self.sizes) - 1, -1, -1))

    @property
    def channels_last(self) -> bool:
        """Dense in memory with channels innermost."""
        order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(self.sizes))
        return order is not None and _dense(self.sizes, self.strides, order)

    @property
    def seems_channels_last(self) -> bool:
        """Strides are in the order of channels last, be it dense or not: ``suggest_memory_format``."""
        order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(self.sizes))
        if order is None or self.strides[1] == 0:
            return False
        least = 0
        for d in order:
            if self.sizes[d] == 0 or self.strides[d] < least:
                return False
            if d == 0 and least == self.strides[1]:
                return False
            least = self.strides[d] * max(self.sizes[d], 1)
        return True

    @property
    def copy_bytes(self) -> int:
        """What ``contiguous()`` allocates: nothing where it is."""
        return 0 if self.contiguous else self.bytes

    def transposed(self, one: int, other: int) -> "Layout":
        """The view with two dimensions swapped."""
        sizes, strides = list(self.sizes), list(self.strides)
        sizes[one], sizes[other] = sizes[other], sizes[one]
        strides[one], strides[other] = strides[other], strides[one]
        return Layout(tuple(sizes), tuple(strides), self.dtype, self.offset)


def layout(tensor: torch.Tensor) -> Layout:
    """The layout of a strided tensor, real or fake."""
    return Layout(
        tuple(concrete_size(size) for size in tensor.shape),
        tuple(concrete_size(stride) for stride in tensor.stride()),
        tensor.dtype,
        concrete_size(tensor.storage_offset()),
    )


def maybe(tensor: Any) -> Layout | None:
    """The layout of an argument that may be ``None``."""
    return layout(tensor) if isinstance(tensor, torch.Tensor) else None


def copies(*tensors: Layout | None) -> int:
    """Bytes of contiguous copies of those that are not contiguous, all at once."""
    return sum(t.copy_bytes for t in tensors if t is not None)


def rounded(count: int) -> int:
    """Bytes of a block of the caching allocator."""
    return -(-count // CUDA_ROUNDING_BYTES) * CUDA_ROUNDING_BYTES


def allocated(elements: int, dtype: torch.dtype) -> int:
    """Bytes of a block for so many elements."""
    return rounded(elements * dtype.itemsize)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which CUDA kernels add up floats of another."""
    return torch.float32 if dtype in HALF else dtype


def summed(source: Layout, asked_for: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum, or a product, of elements: whole numbers and booleans are added up in 64 bits."""
    if asked_for is not None:
        return asked_for
    whole = not source.dtype.is_floating_point and not source.dtype.is_complex
    return torch.int64 if whole else source.dtype


def ceil_div(one: int, other: int) -> int:
    return -(-one // other)


def _dense(sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    expected = 1
    for d in order:
        if sizes[d] != 1:
            if strides[d] != expected and 0 not in sizes:
                return False
            expected *= sizes[d]
    return True
