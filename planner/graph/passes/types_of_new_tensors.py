"""Operations that make tensors without naming their type, under another default type than PyTorch's own.

The type of their results depends on the default type at the moment when they run: later, in a backward or in
a measurement, it may be another.
"""

import torch
from torch.fx import GraphModule, Node

from planner._torch.operators import is_operator, takes_type
from planner.graph.joint_pass import TraceContext

_OWN = torch.float32


def name_types_of_new_tensors(joint: GraphModule, context: TraceContext) -> None:  # noqa: ARG001
    """Write the types of their results in the trace into the arguments of such operations."""
    if torch.get_default_dtype() is _OWN:
        return
    for node in joint.graph.nodes:
        made = node.meta.get("val")
        if isinstance(made, torch.Tensor) and _names_no_type(node):
            node.update_kwarg("dtype", made.dtype)


def _names_no_type(node: Node) -> bool:
    if node.op != "call_function" or not is_operator(node.target) or not takes_type(node.target):
        return False
    given = [other.meta.get("val") for other in node.all_input_nodes]
    return node.kwargs.get("dtype") is None and not any(isinstance(value, torch.Tensor) for value in given)
