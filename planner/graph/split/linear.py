"""Which operations on gradients give multiples of these: twice the gradient gives twice the result.

Backwards of autograd's do. What a user's hook or function makes of a gradient, as one that clips it, need
not.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from planner._torch.execution.mask_operators import MASKED_PRODUCT

aten = torch.ops.aten

_EITHER = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.mm.default})
"""Linear in each of two arguments."""

_BOTH = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.cat.default})
"""Linear in all arguments together."""

_FIRST = frozenset(
    {
        *(aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten._to_copy.default, aten.clone.default),
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
        *(aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor),
        aten.slice_backward.default,
        *(aten.alias.default, aten.detach.default, aten.sum.dim_IntList, aten.sum.default),
        *(aten.mean.dim, aten.mean.default, aten.gather.default, aten.nll_loss_backward.default),
        *(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
        *(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.silu_backward.default),
        *(aten.gelu_backward.default, aten.threshold_backward.default),
        *(aten.native_layer_norm_backward.default, operator.getitem, MASKED_PRODUCT),
    }
)
"""Linear in the first argument."""

_FINE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
)
"""Types whose numbers are so near to each other that what is rounded to them counts as a multiple."""

_ZEROS = frozenset({aten.new_zeros.default, aten.zeros_like.default, aten.zeros.default})


def is_linear(node: Node, gradients: Collection[Node]) -> bool:
    """Whether an operation's result is a multiple of the gradients that it reads.

    Args:
        node: The operation.
        gradients: The nodes whose results are computed of gradients.
    """
    read = [n for n in node.all_input_nodes if n in gradients]
    args: Any = node.args
    if not read or node.target in _ZEROS:
        return True
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype not in _FINE:
        return False
    if node.target in _EITHER:
        return len(read) == 1 and args[0] is not args[1]
    if node.target in _BOTH:
        return len(read) == len(node.all_input_nodes) and not any(
            isinstance(n, int | float) for n in args[:2]
        )
    if node.target is aten.nll_loss_backward.default:
        return read == [args[0]] or (set(read) == {args[0], args[6]} and args[4] != 1)
    if node.target in _FIRST:
        return read == [args[0]]
    if node.target in (aten.masked_fill.Scalar, aten.scatter.value):
        return read == [args[0]] and args[-1] == 0
    if node.target is aten.where.self:
        return args[0] not in gradients and all(n in gradients or _is_zero(n) for n in args[1:])
    if node.target in (aten.scatter_add.default, aten.scatter.src):
        return args[2] not in gradients and all(n in gradients or _is_zero(n) for n in (args[0], args[3]))
    return False


def _is_zero(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    filled = node.target in (aten.full.default, aten.scalar_tensor.default)
    return node.target in _ZEROS or (filled and bool(node.args[-1] == 0))
