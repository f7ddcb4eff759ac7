"""What a tensor without data is, asked without calling an operator."""

from collections.abc import Sequence
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import FakeTensor

from planner._torch.tensors import dispatch_keys

ASKS_FOR_DEVICE = torch.ops.prim.device.default
"""What dispatch modes see where autograd or an operator asks for the device of a tensor without data: half of
all that they see, and more."""


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """All that the results of operators on a tensor without data depend on; None where that is more than
    numbers, as values that are known or symbols for sizes, and for tensors with data."""
    if (
        not isinstance(tensor, FakeTensor)
        or tensor.constant is not None
        or tensor._has_symbolic_sizes_strides
        or tensor.layout is not torch.strided
    ):
        return None
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        tensor.requires_grad,
        dispatch_keys(tensor),
    )


def device_of(tensor: torch.Tensor) -> torch.device:
    """``tensor.device``, for which a tensor without data would ask all dispatch modes."""
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's storage takes: none on the meta device, and none of what PyTorch knows to be
    zeros, as forward differentiation makes it."""
    known = torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ZeroTensor)
    return 0 if known or device_of(tensor).type == "meta" else tensor.untyped_storage().nbytes()


def device_asked_for(args: Sequence[Any]) -> torch.device:
    """What :data:`ASKS_FOR_DEVICE` returns, by its arguments."""
    device: torch.device = fake_tensors._device_handler(args)
    return device
