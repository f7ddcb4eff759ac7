"""Results of ReLU of which only the signs are kept: its backward reads one bit for each element.

Where nothing else in the backward reads the result of ReLU, the forward packs, right after it, one bit for
each element: whether it is not zero. Re-runs of other operations may still read the result; it is then
recomputed. A schedule lists the backwards that read bits.
"""

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from planner._torch import fake
from planner._torch.execution.op_bindings import same_sizes, same_steps
from planner._torch.execution.sign_operators import MASK_GRADIENT, MASK_GRADIENT_, PACK_SIGNS
from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.passes.max_pooling import undetached
from planner.graph.replay.packed import LEAST_ELEMENTS, bits_of
from planner.training_step.call import Call

aten = torch.ops.aten


def relu_before(joint: JointGraph, op: JointOp) -> JointOp | None:
    """The ReLU whose backward an operation is, if that may read bits; None for all others."""
    node = op.node
    if not op.backward or node.target is not aten.threshold_backward.default or node.args[2] != 0:
        return None
    result, gradient = undetached(node.args[1]), node.args[0]
    if result not in joint.op_of or result.target is not aten.relu.default:
        return None
    relu, value = joint.ops[joint.op_of[result]], result.meta["val"]
    if relu.backward or not _is_whole(value) or not isinstance(gradient, Node):
        return None
    if not (same_sizes(value, gradient.meta["val"]) and same_steps(value, gradient.meta["val"])):
        return None
    (storage,) = joint.storages_of(result)
    return relu if joint.read_in_backward[storage] == [op] else None


def signs_of(relu: JointOp) -> torch.Tensor:
    """The bits of a ReLU's result without data, without data."""
    return bits_of(relu.node.meta["val"])


def save_signs(graph: FxGraph, relu: JointOp, result: Node) -> Node:
    """Emit the packing of a ReLU's result."""
    packed = graph.call_function(PACK_SIGNS, (result,))
    packed.meta["val"] = signs_of(relu)
    return packed


def emit_masked(graph: FxGraph, op: JointOp, gradient: Node, signs: Node) -> Node:
    """Emit the backward of a ReLU whose signs are kept."""
    masked = graph.call_function(MASK_GRADIENT, (gradient, signs))
    masked.meta = dict(op.node.meta)
    return masked


def sign_calls(relu: JointOp, op: JointOp) -> tuple[Call, Call]:
    """The operation that packs the signs of a ReLU's result, and the backward that reads them, on tensors
    without data."""
    operator = MASK_GRADIENT if op.written is None else MASK_GRADIENT_
    masked = Call(operator, (gradient_of(op).meta["val"], signs_of(relu)), {})
    return Call(PACK_SIGNS, (relu.node.meta["val"],), {}), masked


def gradient_of(op: JointOp) -> Node:
    """The gradient that a backward of ReLU masks."""
    gradient = op.node.args[0]
    assert isinstance(gradient, Node)
    return gradient


def _is_whole(value: torch.Tensor) -> bool:
    count = fake.concrete_size(value.numel())
    return (
        value.device.type == "cpu"
        and value.is_floating_point()
        and count >= LEAST_ELEMENTS
        and value.is_contiguous()
        and fake.storage_bytes(value) == count * value.element_size()
    )
