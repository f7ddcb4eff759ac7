"""Operators that tracing replaces by decompositions, and eager runs as kernels."""

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch

from planner._torch.patches import kernels_replaced

# Those of them that stand for what CUDA runs, see planner/_torch/cuda/kernels.py.
_CUDA_KERNELS = {
    "dropout", "scaled_dot_product_attention", "_batch_norm_impl_index", "group_norm", "_fused_rms_norm"
}  # fmt: skip
_DECOMPOSED_AT = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@functools.cache
def _decomposed_operators() -> list[Any]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    return [
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket) and packet.__name__ not in _CUDA_KERNELS
        for overload in packet.overloads()
        if any(key in getattr(packet, overload).py_kernels for key in _DECOMPOSED_AT)
    ]


@contextlib.contextmanager
def kernels_of_eager(keep: Collection[str] = frozenset()) -> Iterator[None]:
    """Dispatch interpolations, recurrent layers, matrix products and some more as eager runs them.

    Where the Python dispatcher is on, as in tracing, PyTorch otherwise replaces them by decompositions
    in Python, which round differently, hold more memory, and leave out the dropout between layers of
    nn.LSTM.

    Args:
        keep: Names of operators whose decompositions stay.
    """
    operators = [op for op in _decomposed_operators() if op.overloadpacket.__name__ not in keep]
    kernels: dict[Any, dict[Any, Any]] = {op: dict.fromkeys(_DECOMPOSED_AT) for op in operators}
    kernels[torch.ops.aten.dropout.default] = dict.fromkeys(_DECOMPOSED_AT, dropout_of_eager)
    with kernels_replaced(kernels):
        yield


def dropout_of_eager(tensor: torch.Tensor, probability: float, train: bool) -> torch.Tensor:
    """Dropout that keeps everything is its input, and what keeps nothing draws no numbers, as in eager.

    PyTorch's decomposition copies the one and draws for the other.
    """
    if not train or probability == 0:
        return tensor
    if probability == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    kept: torch.Tensor = torch.ops.aten.native_dropout(tensor, probability, train)[0]
    return kept
