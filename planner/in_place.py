"""Writes in place whose results lie in memory as what they were written to, as eager's do.

AOTAutograd traces ``a.sigmoid_()`` as ``sigmoid(a)``, a tensor of its own, which is contiguous where ``a``
was a stretch of something larger (a chunk of a recurrent cell's gates). Kernels take other paths for it, in
the backward too, and some (``normal_``) even draw other numbers. Such an operation runs in place all the
same, on a copy that lies in memory as ``a`` does. :mod:`planner._torch_in_place` finds them while tracing.
"""

from typing import Any

import torch
from torch.fx import Node

from planner import _torch

_KEY = "planner_in_place"
"""Key among what is known of a node: the operator that writes in place."""


def mark(node: Node, operator: Any) -> None:
    """Let a node run as a write in place by ``operator``, which takes the arguments that the node has."""
    node.meta[_KEY] = operator


def operator_in_place(node: Node) -> Any | None:
    """The operator by which a node writes in place, on a copy; None for all others."""
    return node.meta.get(_KEY) if _torch.is_operator(node.target) else None


class OnCopy:
    """An operator that writes to its first argument, called on a copy of that, which it returns."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self, written: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(written, torch.Tensor):
            return self._operator(_copied(written), *args, **kwargs)
        copies = [_copied(tensor) for tensor in written]
        self._operator(copies, *args, **kwargs)
        return copies


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copied: torch.Tensor = torch.ops.aten.copy_.default(laid_out_like(tensor), tensor)
    return copied


def laid_out_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, steps in memory and type, with no values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
