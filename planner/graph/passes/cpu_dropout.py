"""Dropout on the CPU as eager computes it.

Tracing takes ``native_dropout`` on every device. On the CPU eager multiplies by a mask that is
divided by the probability to keep, where ``native_dropout`` multiplies the mask by the reciprocal.
In half precision only their backwards round differently, in single precision both halves do, for
about every fourth probability.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner.graph.joint_pass import TraceContext

aten = torch.ops.aten


def divide_masks(joint: GraphModule, context: TraceContext) -> None:
    """Divide masks of dropout by the probability to keep."""
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
    """Take the mask of ``native_dropout``, but not its product."""
    value: torch.Tensor = node.meta["val"][0]
    probability = float(node.args[1])  # type: ignore[arg-type]
    members = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if value.device.type != "cpu" or _scales_alike(value.dtype, probability) or 0 not in members:
        return
    if value.dtype not in (torch.float32, torch.float64):
        return
    graph, product = module.graph, members[0]
    with graph.inserting_after(product):
        result = graph.call_function(aten.mul.Tensor)
    with graph.inserting_before(result):
        mask = members.get(1)
        if mask is None:
            mask = graph.call_function(operator.getitem, (node, 1))
            mask.meta = {**product.meta, "val": node.meta["val"][1]}
        else:
            product.append(mask)
        result.args = (node.args[0], _noise(module, mask, value, probability, product))
    result.meta = {**product.meta, "val": fake.same_shape(value)}
    product.replace_all_uses_with(result)
    graph.erase_node(product)


def _dropout_backward(module: GraphModule, node: Node) -> None:
    gradient, mask, _scale = node.args
    value: torch.Tensor = node.meta["val"]
    probability = _dropout_probability(mask)
    if value.device.type != "cpu" or probability is None or _scales_alike(value.dtype, probability):
        return
    graph = module.graph
    with graph.inserting_before(node):
        noise = _noise(module, mask, value, probability, node)
        result = graph.call_function(aten.mul.Tensor, (gradient, noise))
    result.meta = {**node.meta, "val": fake.same_shape(value)}
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _noise(module: GraphModule, mask: object, value: torch.Tensor, probability: float, like: Node) -> Node:
    noise = module.graph.call_function(aten._to_copy.default, (mask,), {"dtype": value.dtype})  # type: ignore[arg-type]
    scaled = module.graph.call_function(aten.div.Scalar, (noise, 1.0 - probability))
    for made in (noise, scaled):
        made.meta = {**like.meta, "val": fake.same_shape(value)}
    return scaled


def _dropout_probability(mask: object) -> float | None:
    source = mask.args[0] if isinstance(mask, Node) and mask.op == "call_function" and mask.args else None
    if isinstance(source, Node) and source.target is aten.native_dropout.default:
        return float(source.args[1])  # type: ignore[arg-type]
    return None


def _scales_alike(dtype: torch.dtype, probability: float) -> bool:
    """Whether dividing by the probability to keep and multiplying by its reciprocal are the same."""
    if probability >= 1.0 or dtype is torch.float64:
        return True
    if dtype is not torch.float32:
        return False
    with fake.without_modes():
        one = torch.ones((), dtype=dtype)
        return bool(one.div(1.0 - probability) == one.mul(1.0 / (1.0 - probability)))
