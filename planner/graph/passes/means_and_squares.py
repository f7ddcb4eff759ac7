"""Gradients of means and squares, with fewer passes over memory than PyTorch's formulas make.

PyTorch repeats the gradient of a mean along the averaged dimensions and divides it there: here it is divided
first. The gradient of a square takes the first power, which is a copy: here it takes the base itself. Every
element is computed by the same operations of the same numbers. This is done where only products read the
result, and where their results keep their strides.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.execution.op_bindings import same_sizes, same_steps
from planner._torch.joint import aot_metadata
from planner.graph.joint_pass import TraceContext

aten = torch.ops.aten


def simplify_means_and_squares(joint: GraphModule, context: TraceContext) -> None:  # noqa: ARG001
    """Divide gradients of means before they are repeated, and copy nothing as a first power."""
    backward = aot_metadata.backward_calls(joint.graph)
    for node in [n for n in joint.graph.nodes if n in backward]:
        if node.target is aten.div.Scalar:
            _divide_first(joint, node)
        elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 1:
            _take_base(joint, node)


def _divide_first(joint: GraphModule, node: Node) -> None:
    repeated, divisor = node.args
    if not isinstance(repeated, Node) or repeated.target is not aten.expand.default:
        return
    given = repeated.args[0]
    assert isinstance(given, Node)
    value = given.meta["val"]
    if same_sizes(value, node.meta["val"]) or not _may_stand_for(repeated.meta["val"], node):
        return
    with joint.graph.inserting_before(node):
        divided = joint.graph.call_function(aten.div.Scalar, (given, divisor))
        expanded = joint.graph.call_function(aten.expand.default, (divided, repeated.args[1]))
    number = divisor.meta["val"] if isinstance(divisor, Node) else divisor
    divided.meta = {**node.meta, "val": fake.called(aten.div.Scalar, value, number)}
    sizes = node.meta["val"].shape
    expanded.meta = {**repeated.meta, "val": fake.called(aten.expand.default, divided.meta["val"], sizes)}
    node.replace_all_uses_with(expanded)
    joint.graph.erase_node(node)
    if not repeated.users:
        joint.graph.erase_node(repeated)


def _take_base(joint: GraphModule, node: Node) -> None:
    base = node.args[0]
    assert isinstance(base, Node)
    if _may_stand_for(base.meta["val"], node):
        node.replace_all_uses_with(base)
        joint.graph.erase_node(node)


def _may_stand_for(value: torch.Tensor, node: Node) -> bool:
    """Whether only products read a result, and are the same tensors with another value in its place."""
    own = node.meta["val"]
    if not fake.is_fake(own) or not own.is_floating_point() or own.dtype is not value.dtype:
        return False
    if any(isinstance(size, int) and size == 1 for size in own.shape):
        return False  # the traced strides of such dimensions are not certain, see known_strides.py

    def is_same(product: Node) -> bool:
        if product.target not in (aten.mul.Tensor, aten.mul.Scalar) or product.kwargs:
            return False
        operands = [value if n is node else _value(n) for n in product.args]
        made, expected = fake.called(product.target, *operands), product.meta["val"]
        return made.dtype is expected.dtype and same_sizes(made, expected) and same_steps(made, expected)

    return all(map(is_same, node.users))


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument
