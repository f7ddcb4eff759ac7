"""``one_hot`` on tensors without data, by the operators that PyTorch calls with data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner._torch import fake


class OneHotAsWithData(TorchFunctionMode):
    """A context in which it is computed as with data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **named(kwargs))
        return func(*args, **(kwargs or {}))


def named(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Its arguments by name, the first of which PyTorch takes by two names."""
    return {"tensor" if name == "input" else name: value for name, value in (kwargs or {}).items()}


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 0 or not fake.is_fake(tensor):
        return torch.nn.functional.one_hot(tensor, num_classes)
    if tensor.device.type == "cpu" and tensor.numel():
        torch.aminmax(tensor)  # whether these are classes
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)
