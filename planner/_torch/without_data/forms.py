"""How a tensor lies in its storage, apart from its data."""

from typing import Any, NamedTuple

import torch

from planner._torch import fake
from planner._torch.tensors import SPARSE, held_tensors
from planner._torch.without_data.plain import device_of


class Form(NamedTuple):
    """How a tensor without data lies in its storage."""

    mode: Any
    elements: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form of a tensor."""
        elements = tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)
        offset = int(tensor.storage_offset())
        mode = fake.mode_of([tensor])
        return cls(mode, elements, tensor.shape, tensor.stride(), offset, tensor.dtype, device_of(tensor))

    def tensor(self) -> torch.Tensor:
        """A tensor of this form, in memory of its own."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if self.offset == 0 and self.elements == last + 1 and 0 not in self.shape:
            return fake.empty_strided(self.mode, self.shape, self.strides, self.dtype, self.device)
        base = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        return base.as_strided(self.shape, self.strides, self.offset)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory, of which a part can be named by its offset, sizes and strides."""
    return (
        tensor.layout not in SPARSE
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and held_tensors(tensor)[0] is tensor
    )
