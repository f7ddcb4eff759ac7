"""Sums of gradients with the strides of eager's, which are made in place.

Where two gradients are accumulated, the engine adds the later to the earlier in place, if nobody else holds
that. A sum that is traced is a tensor of its own, whose dimensions of one element get other strides. Kernels
that detect channels-last images look at those strides too, and then sum in another order.
"""

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.execution import op_bindings
from planner.graph.accumulation import is_sum
from planner.graph.joint_pass import TraceContext

IN_PLACE = "planner_sum_in_place"
"""Key in a node's ``meta``: see :func:`is_sum_in_place`."""


def mark_sums_in_place(joint: GraphModule, context: TraceContext) -> None:
    """Mark the sums that eager makes in place; :func:`add_as_in_place` computes them."""
    if context.cuda:
        return
    last: dict[int, Node] = {}  # by storage, the last node that uses it
    for node in joint.graph.nodes:
        for used in node.all_input_nodes:
            if isinstance(used.meta.get("val"), torch.Tensor):
                last[fake.storage_key(used.meta["val"])] = node
    for node in joint.graph.nodes:
        if (
            node.meta.get("partitioner_tag") == "is_backward"
            and is_sum(node)
            and _may_be_image(node.meta["val"])
        ):
            first: Node = node.args[0]
            made = first.op == "call_function" and first.meta.get("partitioner_tag") == "is_backward"
            if made and last[fake.storage_key(first.meta["val"])] is node:
                node.meta[IN_PLACE] = True


def is_sum_in_place(node: Node) -> bool:
    """Whether eager adds up two gradients in the memory of the first."""
    return IN_PLACE in node.meta


def add_as_in_place(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, with the strides of the first, as if the second were added to it in place."""
    total: torch.Tensor = op_bindings.ADD(first, second)
    steps, found = first.stride(), total.stride()
    if steps != found and all(
        a == b or n == 1 for a, b, n in zip(steps, found, total.shape, strict=True)
    ):  # others of the first are not dense, and nothing is added to them in place
        total.as_strided_(total.shape, steps)
    return total


def _may_be_image(value: torch.Tensor) -> bool:
    return value.dim() in (4, 5) and any(isinstance(size, int) and size == 1 for size in value.shape)
