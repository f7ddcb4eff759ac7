"""Sums of gradients that have the strides of eager's, which are made in place.

Where two gradients are accumulated, the engine adds the later to the earlier in place, if nobody else holds
the earlier one; its base holds a view. A traced sum is a tensor of its own, whose dimensions of one element
get other strides. Kernels that detect channels-last images look at those strides too, and then sum in another
order.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.execution import op_bindings
from planner._torch.operators import returns_no_views
from planner.graph.accumulation import is_sum
from planner.graph.joint_pass import TraceContext

IN_PLACE = "planner_sum_in_place"
"""Key in a node's ``meta``: see :func:`is_sum_in_place`."""


def mark_sums_in_place(joint: GraphModule, context: TraceContext) -> None:
    """Mark the sums that eager makes in place; :func:`add_as_in_place` computes them."""
    if context.cuda:
        return
    last: dict[int, Node] = {}  # by storage, the last node that uses it
    maker: dict[int, Node] = {}  # by storage, the node that makes it
    for node in joint.graph.nodes:
        for made in fake.tree_leaves(node.meta.get("val")):
            if isinstance(made, torch.Tensor) and made.layout is torch.strided:
                maker.setdefault(fake.storage_key(made), node)
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
            key = fake.storage_key(first.meta["val"])
            made = maker[key].op == "call_function" and first.meta.get("partitioner_tag") == "is_backward"
            if made and _without_views(first) is maker[key] and last[key] is node:
                node.meta[IN_PLACE] = True


VIEW = "planner_leaves_as_view"
"""Key in a node's ``meta``: see :func:`leaves_as_view`."""


def mark_views_that_leave(joint: GraphModule, context: TraceContext) -> None:
    """Mark the gradients that leave a graph as views of its results, where that shows in later strides."""
    if context.cuda:
        return
    for node in joint.graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        if (
            node.meta.get("partitioner_tag") == "is_backward"
            and isinstance(value, torch.Tensor)
            and _may_be_image(value)
        ):
            first = _without_views(node)
            if first.op == "call_function" and not returns_no_views(first.target):
                node.meta[VIEW] = True


def leaves_as_view(node: Node) -> bool:
    """Whether a gradient leaves its graph as a view, to which the engine adds nothing in place."""
    return VIEW in node.meta


def is_sum_in_place(node: Node) -> bool:
    """Whether eager adds up two gradients in the memory of the first."""
    return IN_PLACE in node.meta


def add_as_in_place(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, with the strides of the first, as if the second were added to it in place."""
    total: torch.Tensor = op_bindings.ADD(first, second)
    steps, own = first.stride(), total.stride()
    if steps != own and all(
        a == b or n == 1 for a, b, n in zip(steps, own, total.shape, strict=True)
    ):  # else the first is not dense, and eager adds nothing to it in place
        total.as_strided_(total.shape, steps)
    return total


def _without_views(node: Node) -> Node:
    """The node before calls that autograd does not take for views: `_unsafe_view` and `getitem`."""
    while node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _may_be_image(value: torch.Tensor) -> bool:
    return value.dim() in (4, 5) and any(isinstance(size, int) and size == 1 for size in value.shape)
