"""Arguments of operators that fail, or allocate something else, if all that is made up for them is 0 or 1."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_MOST_HALVINGS = 24
"""The norms of a batch of matrices do not span more powers of two."""


def make_valid(operator: object, args: list[Any]) -> None:
    """Change made-up arguments where an operator does not take them as they are; of other operators none.

    Args:
        operator: The operator, without the name of an overload.
        args: Its positional arguments in the order of its schema, with data; changed in place.
    """
    if change := _CHANGES.get(operator):
        with torch.enable_grad():  # without it oneDNN's layers make no reserve
            change(args)


def _mkldnn_rnn_reserve(args: list[Any]) -> None:
    """Run the layer to make the reserve for its backward.

    Fake tensors do not know its size, and the kernels do not check it.
    """
    reverse, mode, hidden, layers, biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
    forward = aten.mkldnn_rnn_layer(
        *args[:7], reverse, batch_sizes, mode, hidden, layers, biases, bidirectional, batch_first, train
    )
    args[22] = forward[3]


def _cudnn_rnn_reserve(args: list[Any]) -> None:
    """Run the layer to make the reserve, and the weights in one buffer, for its backward."""
    forward = aten._cudnn_rnn(*args[:6], *args[10:20])
    args[3], args[20] = forward[4], forward[3]


def _full_bags(args: list[Any]) -> None:
    """Make each bag hold something: an empty one has no gradient to collect, and takes less."""
    args[4].fill_(1)  # bag_size


def _pivots_of_no_swap(args: list[Any]) -> None:
    """Make pivots say that no rows are exchanged; they count from 1, and the kernels refuse others."""
    pivots = args[1]
    pivots.copy_(torch.arange(1, pivots.shape[-1] + 1).expand_as(pivots))


def _true_condition(args: list[Any]) -> None:
    """Make the condition true: a false one stops the whole process in the kernel of a GPU."""
    args[0].fill_(1)


def _other_norms(args: list[Any]) -> None:
    """Give each matrix of a batch another norm. The kernel halves matrices until their norm is small, and
    computes those that it halved as often together, in memory of their own (ATen's ``LinearAlgebra.cpp``,
    ``compute_T18_scale_square``): none take more than those of which no two are halved as often."""
    matrices = args[0]
    if 0 not in matrices.stride():  # else a matrix stands for several, of one norm
        batch = matrices.shape[:-2]
        halvings = torch.arange(batch.numel(), device=matrices.device) % _MOST_HALVINGS
        matrices *= (2.0**halvings).to(matrices.dtype).view(*batch, 1, 1)


def _rows_in_one_group(args: list[Any]) -> None:
    """Put all rows into the first group. Data decide how many each has, and in half precision oneDNN takes
    memory by the largest: what is predicted then is the most that a step takes."""
    first, second, ends = args[:3]
    if ends is not None:
        ends.fill_(second.shape[1] if first.dim() == 3 else first.shape[3 - second.dim()])


_CHANGES: dict[object, Callable[[list[Any]], None]] = {
    aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_reserve,
    aten._cudnn_rnn_backward: _cudnn_rnn_reserve,
    aten._embedding_bag_backward: _full_bags,
    aten.linalg_matrix_exp: _other_norms,
    aten.linalg_ldl_solve: _pivots_of_no_swap,
    aten.linalg_lu_solve: _pivots_of_no_swap,
    aten.lu_unpack: _pivots_of_no_swap,
    aten._assert_async: _true_condition,
    aten._functional_assert_async: _true_condition,
}
if hasattr(aten, "_grouped_mm"):  # since 2.8
    _CHANGES[aten._grouped_mm] = _rows_in_one_group
