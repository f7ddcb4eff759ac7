"""How a tensor lies in memory, for tensors of other sizes as well."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

_MOST_GAPS = 64
"""How much larger a tensor may be, about, than a part of it whose gaps are planned."""

_CUTTING = {"SelectBackward0", "SliceBackward0"}


@dataclass(frozen=True, order=True)
class MemoryLayout:
    """How a tensor lies in memory.

    Attributes:
        dimensions: Its dimensions, those of the largest strides first.
        inside: Where it is a part of a larger tensor, as a half of ``x.chunk(2, 1)`` is: the sizes of that,
            by dimension; 0 where that is its own. Empty where it is no part.
        step: Elements from one to the next along the last of the dimensions, as in ``x[..., ::2]``.
    """

    dimensions: tuple[int, ...]
    inside: tuple[int, ...] = ()
    step: int = 1

    @property
    def is_contiguous(self) -> bool:
        """Whether it is the layout of contiguous tensors."""
        return self == MemoryLayout(tuple(range(len(self.dimensions))))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The layout of a tensor; if its strides are not those of a part of a larger tensor, the order of its
        dimensions alone."""
        strides, sizes = tensor.stride(), tensor.shape
        order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -sizes[d], d)))
        if not order or tensor.numel() == 0 or 0 in strides:  # expanded, be it in one element
            return cls(order)
        inside = [0] * len(order)
        for outer, inner in itertools.pairwise(order):
            size, rest = divmod(strides[outer], strides[inner])
            if rest or size < sizes[inner]:
                return cls(order)
            inside[inner] = size if size > sizes[inner] else 0
        found = cls(order, tuple(inside) if any(inside) else (), strides[order[-1]])
        return found if found.fits(sizes) else cls(order)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether tensors of these sizes may lie so: one that has to be copied takes memory for the gaps."""
        if len(self.dimensions) != len(sizes):
            return False
        reach = sum((n - 1) * step for n, step in zip(sizes, self.strides(sizes), strict=True))
        return reach <= _MOST_GAPS * math.prod(sizes)

    def strides(self, sizes: Sequence[int]) -> list[int]:
        """The strides of a tensor of these sizes."""
        strides, step = [0] * len(sizes), self.step
        for dimension in reversed(self.dimensions):
            strides[dimension] = step
            whole = self.inside[dimension] if self.inside else 0
            step *= max(sizes[dimension], whole, 1)
        return strides

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies so."""
        return self.fits(tensor.shape) and list(tensor.stride()) == self.strides(tensor.shape)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of a part of a contiguous one."""
    base = tensor._base
    if base is None or base.layout is not torch.strided:
        return False
    return base.is_contiguous() and tensor.numel() < base.numel()


def is_cut_out(tensor: torch.Tensor) -> bool:
    """Whether a part is a view of one piece of a contiguous tensor (``x[0]``, ``x[..., :4]``).

    The gradient of such a piece is copied among contiguous zeros, however it lies.
    """
    base, node, last = tensor._base, tensor.grad_fn, ""
    result = None if base is None else base.grad_fn
    if result is None or not is_part(tensor):
        return False
    while node is not None and node is not result:
        last, following = node.name(), node.next_functions
        node = following[0][0] if following else None
    return node is result and last in _CUTTING
