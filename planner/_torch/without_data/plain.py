"""Facts about a tensor without data, read without calling an operator."""

from collections.abc import Sequence
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import FakeTensor

from planner._torch.elsewhere import ModeElsewhere
from planner._torch.tensors import dispatch_keys

ASKS_FOR_DEVICE = torch.ops.prim.device.default
"""The call that dispatch modes see where autograd or an operator asks for the device of a tensor without
data: more than half of all calls."""


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """All facts about a tensor without data that the results of operators depend on.

    None where these are more than numbers, as known values or symbolic sizes, and for tensors with data.
    """
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
    """``tensor.device``, without the call to all dispatch modes that a tensor without data makes."""
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's storage takes: none on the meta device, and none for PyTorch's zero tensors of
    forward-mode differentiation."""
    known = torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ZeroTensor)
    return 0 if known or device_of(tensor).type == "meta" else tensor.untyped_storage().nbytes()


def device_asked_for(args: Sequence[Any]) -> torch.device:
    """The result of :data:`ASKS_FOR_DEVICE`, by its arguments."""
    mode = args[0].fake_mode
    device: torch.device = (
        mode.told(args[0]) if isinstance(mode, ModeElsewhere) else fake_tensors._device_handler(args)
    )
    return device
