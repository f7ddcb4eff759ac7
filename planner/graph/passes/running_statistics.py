"""Backwards of batch normalisation in training, without running statistics.

The backward uses the statistics of the batch, which the forward saved. A traced backward takes the running
ones all the same, as autograd passes them: a graph would hold the new ones, beside the old, until then. They
are optional, and PyTorch's kernel for the CPU does not read them in training
(``batch_norm_backward_cpu_template`` in ``aten/src/ATen/native/Normalization.cpp``).
"""

import torch
from torch.fx import GraphModule, Node

from planner.graph.joint_pass import TraceContext

_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_RUNNING = (3, 4)
"""The positions of running mean and variance among its arguments."""
_TRAIN = 7
_SEEN = frozenset(("cpu", "meta"))
"""Types of device where this was checked; a module on the meta device is planned for the CPU."""


def read_no_running_statistics(joint: GraphModule, context: TraceContext) -> None:
    """Hand no running statistics to backwards that do not read them."""
    if context.cuda:
        return
    for node in joint.graph.find_nodes(op="call_function", target=_BACKWARD):
        gradient = node.args[0]
        assert isinstance(gradient, Node)
        if node.args[_TRAIN] is True and gradient.meta["val"].device.type in _SEEN:
            for position in _RUNNING:
                node.update_arg(position, None)
