"""Dropout on the CPU as eager computes it, in two operations: drawing a mask, and a product with it.

Tracing takes ``native_dropout`` on every device. On the CPU eager multiplies by a mask that is
divided by the probability to keep, where ``native_dropout`` multiplies the mask by the reciprocal.
In half precision only their backwards round differently, in single precision both halves do, for
about every fourth probability. Apart, the mask can be kept while the product is computed again.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from planner._torch.execution.mask_operators import DRAW_MASK, MASKED_PRODUCT
from planner.graph.joint_pass import TraceContext

aten = torch.ops.aten


def divide_masks(joint: GraphModule, context: TraceContext) -> None:
    """Draw masks of dropout apart, and divide them by the probability to keep."""
    if context.cuda:
        return
    for node in list(joint.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.native_dropout.default:
            _dropout(joint, node)
        elif node.target is aten.native_dropout_backward.default:
            _dropout_backward(joint, node)


def _dropout(module: GraphModule, node: Node) -> None:
    value, mask_value = node.meta["val"]
    probability = float(node.args[1])  # type: ignore[arg-type]
    if value.device.type != "cpu" or not 0.0 < probability < 1.0 or node.args[2] is False:
        return
    with module.graph.inserting_before(node):
        mask = module.graph.call_function(DRAW_MASK, (node.args[0], 1.0 - probability))
        product = module.graph.call_function(MASKED_PRODUCT, (node.args[0], mask, 1.0 - probability))
    mask.meta, product.meta = {**node.meta, "val": mask_value}, {**node.meta, "val": value}
    for member in list(node.users):
        assert member.target is operator.getitem
        member.replace_all_uses_with(mask if member.args[1] else product)
        module.graph.erase_node(member)
    module.graph.erase_node(node)


def _dropout_backward(module: GraphModule, node: Node) -> None:
    gradient, mask, _scale = node.args
    if not isinstance(mask, Node) or mask.target is not DRAW_MASK:
        return
    with module.graph.inserting_before(node):
        product = module.graph.call_function(MASKED_PRODUCT, (gradient, mask, mask.args[1]))
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    module.graph.erase_node(node)
