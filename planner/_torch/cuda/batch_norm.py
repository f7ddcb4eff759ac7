"""Batch normalisation by cuDNN, which eager runs on CUDA.

``cudnn_batch_norm`` overwrites running statistics, and its schema does not say so. Where the Python
dispatcher is on, PyTorch replaces it by the native operator, whose kernel is another one: other bits, another
speed. Here it becomes ``_batch_norm_with_update``, which says what it overwrites and runs cuDNN's kernel
wherever eager does. Without running statistics, or in evaluation, it overwrites nothing and stays. Seen with
torch 2.13.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from planner._torch.patches import kernels_replaced

aten = torch.ops.aten

_AUTOGRAD = torch._C.DispatchKey.Autograd
NATIVE = aten._native_batch_norm_legit_functional.default
BY_BACKEND = aten._batch_norm_with_update_functional.default
"""Batch normalisation that computes new running statistics; picks its kernel as eager does."""

RESULTS: dict[object, int] = {NATIVE: 3, BY_BACKEND: 4}
"""How many results of a batch normalisation come before new running statistics; the fourth is cuDNN's
reserve."""


@contextlib.contextmanager
def cudnn_as_eager() -> Iterator[None]:
    """A context in which operations dispatched in Python keep cuDNN's batch normalisation."""
    with kernels_replaced({aten.cudnn_batch_norm.default: {_AUTOGRAD: _cudnn_batch_norm}}):
        yield


def _cudnn_batch_norm(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Any:
    if training and mean is not None and variance is not None:
        return aten._batch_norm_with_update(image, weight, bias, mean, variance, momentum, epsilon)
    # The kernel that autograd has in C++.
    operator: Any = aten.cudnn_batch_norm.default
    return operator._op_dk(_AUTOGRAD, image, weight, bias, mean, variance, training, momentum, epsilon)


def computes_statistics(target: object, arguments: tuple[Any, ...]) -> bool:
    """Whether an operation is a batch normalisation that computes new running statistics."""
    return target is BY_BACKEND or (target is NATIVE and bool(arguments[5]))


def overwrites_unseen(target: object, arguments: tuple[Any, ...]) -> bool:
    """Whether an operation overwrites running statistics though its schema does not say so."""
    if target is aten.cudnn_batch_norm.default:
        return bool(arguments[5]) and arguments[3] is not None
    return target in _UNSEEN


_UNSEEN = {
    getattr(aten, name).default
    for name in ("miopen_batch_norm", "native_batch_norm", "_batch_norm_with_update")
    if hasattr(aten, name)
}


def without_statistics(target: object, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Operator and arguments that give the results of a batch normalisation in training, all but new running
    statistics, bit for bit."""
    if target is BY_BACKEND:
        image, weight, bias, _mean, _variance, momentum, epsilon = arguments
        return aten.cudnn_batch_norm.default, (image, weight, bias, None, None, True, momentum, epsilon)
    image, weight, bias, _mean, _variance, _training, momentum, epsilon = arguments
    return aten._native_batch_norm_legit.no_stats, (image, weight, bias, True, momentum, epsilon)
