"""Where autograd adds up two gradients."""

from typing import Any

import torch
from torch.fx import Node

from planner._torch.execution.op_bindings import same_sizes

aten = torch.ops.aten


def is_sum(node: Any) -> bool:
    """Whether a node of a joint graph adds up two gradients, as the autograd engine does."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    values = [n.meta["val"] for n in (node, *node.args) if isinstance(n, Node)]
    return len(values) == 3 and all(v.dtype is values[0].dtype and same_sizes(v, values[0]) for v in values)
