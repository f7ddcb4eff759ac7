"""Backwards of average pooling and padding that keep only the form of their operand, not the operand.

PyTorch's kernels for the CPU read its sizes and strides and no element. So the forward makes a tensor of that
form without elements, right where the operand is made, and keeps that. On CUDA this was not checked.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.execution.form_operators import FORM_OF, GIVEN_FORMS
from planner.graph.joint_pass import TraceContext


def keep_forms_only(joint: GraphModule, context: TraceContext) -> None:
    """Let backwards of average pooling and padding read forms."""
    forms: dict[Node, Node] = {}
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or node.target not in GIVEN_FORMS:
            continue
        gradient, read, *rest = list[Any](node.args)
        if context.cuda or not _of_forward_on_cpu(read):
            continue
        if read not in forms:
            forms[read] = _form(joint, read)
        with joint.graph.inserting_before(node):
            by_form = joint.graph.call_function(GIVEN_FORMS[node.target], (gradient, forms[read], *rest))
        by_form.kwargs, by_form.meta = dict(node.kwargs), dict(node.meta)
        node.replace_all_uses_with(by_form)
        joint.graph.erase_node(node)


def _form(joint: GraphModule, read: Node) -> Node:
    if read.op == "placeholder":
        after = next(n for n in joint.graph.nodes if n.op != "placeholder").prev
    else:
        after = read
    with joint.graph.inserting_after(after):
        form = joint.graph.call_function(FORM_OF, (read,))
    form.meta = {**read.meta, "val": fake.called(FORM_OF, read.meta["val"]), "partitioner_tag": "is_forward"}
    return form


def _of_forward_on_cpu(node: object) -> bool:
    if not isinstance(node, Node) or node.meta.get("partitioner_tag") == "is_backward":
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
