"""Arguments that cannot be all zeros or ones where an operator is run to see what it allocates."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def complete(operator: object, args: list[Any]) -> None:
    """Put into made-up arguments of an operator those that it needs to be of one another.

    Args:
        operator: The operator, without the name of an overload.
        args: Its positional arguments, with data; changed in place.
    """
    if change := _CHANGES.get(operator):
        with torch.enable_grad():
            change(args)


# A layer's backward needs the reserve that the layer made. Its size is one that fake tensors do not know and
# the kernels do not check, so it is made by running the layer.


def _mkldnn_rnn_reserve(args: list[Any]) -> None:
    reverse, mode, hidden, layers, biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
    forward = aten.mkldnn_rnn_layer(
        *args[:7], reverse, batch_sizes, mode, hidden, layers, biases, bidirectional, batch_first, train
    )
    args[22] = forward[3]


def _cudnn_rnn_reserve(args: list[Any]) -> None:
    forward = aten._cudnn_rnn(*args[:6], *args[10:20])
    args[3], args[20] = forward[4], forward[3]


def _full_bags(args: list[Any]) -> None:
    """Bags with something in each: a bag without has no gradient to be collected, and takes less."""
    args[4].fill_(1)


def _pivots_of_no_swap(args: list[Any]) -> None:
    """Rows that are exchanged in a factorisation, which are counted from 1: the kernels refuse others."""
    pivots = args[1]
    pivots.copy_(torch.arange(1, pivots.shape[-1] + 1).expand_as(pivots))


def _what_holds(args: list[Any]) -> None:
    """A condition that is true: where one is not, the kernel on a GPU stops the whole process."""
    args[0].fill_(1)


_CHANGES: dict[object, Callable[[list[Any]], None]] = {
    aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_reserve,
    aten._cudnn_rnn_backward: _cudnn_rnn_reserve,
    aten._embedding_bag_backward: _full_bags,
    aten.linalg_ldl_solve: _pivots_of_no_swap,
    aten.linalg_lu_solve: _pivots_of_no_swap,
    aten.lu_unpack: _pivots_of_no_swap,
    aten._assert_async: _what_holds,
    aten._functional_assert_async: _what_holds,
}
