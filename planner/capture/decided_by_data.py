"""Backwards that eager chooses by the data, and that a trace, which has none, takes in one form."""

from collections.abc import Iterable

import torch

from planner.graph.joint_graph import JointGraph

aten = torch.ops.aten

PRODUCTS = (
    "the gradient of torch.prod is rounded otherwise than without a plan where no factor is zero, and "
    "differs in the last bits: PyTorch looks for zeros among the data, and traces what is right for both. "
    "Where bits matter, write the product of a few factors as multiplications, or put "
    "@torch.compiler.disable on the function that computes it. planner.verify() tells"
)


def has_products(joints: Iterable[JointGraph]) -> bool:
    """Whether gradients pass through a product of all elements, or of those of a dimension."""
    return any(_differentiates_a_product(joint) for joint in joints)


def _differentiates_a_product(joint: JointGraph) -> bool:
    nodes = [op.node for op in joint.ops]
    forward, backward = nodes[: joint.forward_length], nodes[joint.forward_length :]
    products = {n.meta.get("seq_nr") for n in forward if n.target in (aten.prod.default, aten.prod.dim_int)}
    return any(n.target is aten.cumprod.default and n.meta.get("seq_nr") in products for n in backward)
