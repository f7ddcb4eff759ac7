"""Backwards of max-pooling that do not keep the operand.

PyTorch's backward takes the operand for its sizes only. Where the operand is the result of ReLU, the backward
of ReLU comes next and masks by elements above zero. Here the gradient is masked before, by the pooled result:
pooling hands gradients only to the elements that the result consists of. The same numbers are added up in
the same order. A result that leaves the graph is not used so: eager does not read it again, so the step may
change it in place.
"""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.execution.op_bindings import same_sizes, same_steps
from planner._torch.execution.own_backwards import memory_format
from planner._torch.execution.pooling_operators import GIVEN_SIZES
from planner.graph.joint_pass import TraceContext

aten = torch.ops.aten

_ON_CUDA = frozenset({aten.max_pool2d_with_indices_backward.default})
"""Backwards whose kernels for CUDA, too, were seen to read no element of the operand."""


def keep_nothing_pooled(joint: GraphModule, context: TraceContext) -> None:
    """Let backwards of max-pooling read sizes, and the mask of a ReLU before it the pooled result."""
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target in GIVEN_SIZES:
            _mask_before(joint, node)
            if node.target in _ON_CUDA or not (context.cuda or node.meta["val"].is_cuda):
                _read_sizes_only(joint, node)


def _mask_before(joint: GraphModule, node: Node) -> None:
    """Mask the gradient before the backward of pooling by its result, not after it by its operand."""
    gradient, pooled, *_, indices = _arguments(node)
    mask = next(iter(node.users), None)
    if (
        mask is None
        or len(node.users) > 1
        or mask.target is not aten.threshold_backward.default
        or mask.args[0] is not node
        or mask.args[2] != 0
        or undetached(mask.args[1]) is not undetached(pooled)
        or undetached(pooled).target is not aten.relu.default  # whose results are zero, above, or NaN
        or not _alike(mask.meta["val"], node.meta["val"])
    ):
        return
    result = _result_beside(indices, pooled)
    if result is None or _is_handed_out(joint, result):
        return
    with joint.graph.inserting_before(node):
        earlier = joint.graph.call_function(mask.target, (gradient, result, 0))
    gradients, results = gradient.meta["val"], result.meta["val"]
    earlier.meta = {**mask.meta, "val": fake.called(mask.target, gradients, results, 0)}
    node.update_arg(0, earlier)
    mask.replace_all_uses_with(node)
    joint.graph.erase_node(mask)


def _is_handed_out(joint: GraphModule, result: Node) -> bool:
    """Whether a result, or a view of it, leaves the graph: it may be changed in place before the backward."""
    outputs: Any = joint.graph.output_node().args[0]
    handed_out = {fake.storage_key(o.meta["val"]) for o in outputs if isinstance(o, Node) and _is_tensor(o)}
    return fake.storage_key(result.meta["val"]) in handed_out


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _read_sizes_only(joint: GraphModule, node: Node) -> None:
    gradient, pooled, *rest = _arguments(node)
    shape, indices = pooled.meta["val"].shape, rest[-1].meta["val"]
    if memory_format(pooled.meta["val"]) is not memory_format(indices):
        return
    if pooled.op == "placeholder" and not all(isinstance(size, int) for size in shape):
        return
    sizes: list[Any] = [s if isinstance(s, int) else _size(joint, pooled, i) for i, s in enumerate(shape)]
    with joint.graph.inserting_before(node):
        by_sizes = joint.graph.call_function(GIVEN_SIZES[node.target], (gradient, sizes, *rest))
    by_sizes.meta = dict(node.meta)
    node.replace_all_uses_with(by_sizes)
    joint.graph.erase_node(node)


def _size(joint: GraphModule, node: Node, dimension: int) -> Node:
    """A node that reads a symbolic size of ``node``, right after it."""
    for user in node.users:
        if user.target is aten.sym_size.int and user.args == (node, dimension):
            return user
    with joint.graph.inserting_after(node):
        read = joint.graph.call_function(aten.sym_size.int, (node, dimension))
    read.meta["val"] = node.meta["val"].shape[dimension]
    return read


def _result_beside(indices: Node, pooled: Node) -> Node | None:
    """The node of the result that pooling returned beside indices; None where there is none."""
    call = indices.args[0] if indices.target is operator.getitem else None
    if not isinstance(call, Node) or undetached(call.args[0]) is not undetached(pooled):
        return None
    return next((user for user in call.users if user.args == (call, 0)), None)


def _arguments(node: Node) -> list[Any]:
    return list(node.args)


def undetached(node: Any) -> Any:
    """A node before the detached copies and aliases that autograd makes of it."""
    while isinstance(node, Node) and node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype is right.dtype and same_sizes(left, right) and same_steps(left, right)
