"""Nodes of a joint graph that run as writes in place, on a copy."""

from typing import Any

import torch
from torch.fx import Node

IN_PLACE_OPERATOR = "planner_in_place"
"""Key in a node's ``meta``: the operator that writes in place."""


def mark(node: Node, operator: Any) -> None:
    """Let a node run as a write in place by ``operator``, which takes the arguments that the node has."""
    node.meta[IN_PLACE_OPERATOR] = operator


def laid_out_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
