"""Results of the forward that can be kept in the host's memory until the backward fetches them.

The result is sent right after the last operation that writes it. In place of a second run it is fetched,
which reads nothing else. A mask is sent as bits. What another graph hands on to this one is sent as it comes.
"""

import operator

import torch
from torch.fx import Node

from planner._torch import fake
from planner.graph.dying_operands import writing
from planner.graph.joint_graph import JointGraph, JointOp


def sent_node(joint: JointGraph, op: JointOp) -> Node | None:
    """The node of the tensor that is kept on the host, of an operation whose result is; None: none can be.

    Of several results it is the largest. One that others write over is sent as the last of them leaves it.
    """
    if op.is_input:
        changed = {joint.primals[i] for i in joint.mutated if i < len(joint.primals)}
        return op.node if op.node not in changed and is_whole(op.node.meta["val"]) else None
    if op.backward or not op.allocates:
        return None
    members = [u for u in op.node.users if u.target is operator.getitem]
    nodes = [op.node] if isinstance(op.node.meta.get("val"), torch.Tensor) else members
    nodes = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    node = max(nodes, key=lambda n: fake.storage_bytes(n.meta["val"]), default=None)
    if node is None or joint.storage_of.get(node) not in op.allocates:
        return None
    storage = joint.storage_of[node]
    for writer in joint.ops[: joint.forward_length]:
        if writer.written == storage:
            if writing(writer.node) is None:  # a collective, which writes when it is waited for
                return None
            node = writer.node
    value = node.meta["val"]
    return node if is_whole(value) else None


def is_whole(value: object) -> bool:
    """Whether a tensor is all of its storage, each element once."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    expected = 1
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if fake.concrete_size(size) != 1:
            if fake.concrete_size(step) != expected:
                return False
            expected *= fake.concrete_size(size)
    return fake.storage_bytes(value) == expected * value.element_size()
