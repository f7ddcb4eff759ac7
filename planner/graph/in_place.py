"""Writes in place whose results have the strides of the tensor that is written to, as in eager.

AOTAutograd traces ``a.sigmoid_()`` as ``sigmoid(a)``, a tensor of its own, which is contiguous where ``a``
was a part of a larger tensor (a chunk of a recurrent cell's gates). Kernels take other paths for it, in the
backward too, and some (``normal_``) even draw other numbers. So such an operation runs in place, on a copy
with the strides of ``a``. :mod:`planner._torch.joint.in_place` finds them while
tracing.
"""

import re
from typing import Any

import torch
from torch.fx import Node

from planner._torch import operators
from planner._torch.joint.in_place import IN_PLACE_OPERATOR, laid_out_like


def operator_in_place(node: Node) -> Any | None:
    """The operator by which a node writes in place, on a copy; None for all others."""
    return node.meta.get(IN_PLACE_OPERATOR) if operators.is_operator(node.target) else None


class OnCopy:
    """An operator that writes to its first argument, called on a copy of that, which it returns."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __repr__(self) -> str:
        # torch.fx writes it into a graph's code where it is an argument, as in a random draw that runs again.
        return "on_copy_" + re.sub(r"\W", "_", str(self._operator))

    def __call__(self, written: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(written, torch.Tensor):
            return self._operator(_copied(written), *args, **kwargs)
        copies = [_copied(tensor) for tensor in written]
        self._operator(copies, *args, **kwargs)
        return copies


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copied: torch.Tensor = torch.ops.aten.copy_.default(laid_out_like(tensor), tensor)
    return copied
