"""The operators that normalise on CUDA, captured on tensors without data on the CPU.

Batch normalisation is cuDNN's there, in single precision and some cases of half; the rules are those of
``_select_batch_norm_backend`` in ``Normalization.cpp``. Group normalisation makes its input contiguous, which
the CPU's leaves channels-last. ``rms_norm`` is one kernel on CUDA, ``_fused_rms_norm``, where it has no
weight or one of its input's dtype, which ``rms_norm`` itself decides; the CPU has no such kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_MOST_IN_TRAINING, _MOST_IN_EVALUATION = 880_801, 65_535
_CUDNN = 1
"""The number by which PyTorch notes that cuDNN normalised."""


def normalisations_of_cuda(cudnn: bool) -> dict[Any, Callable[..., Any]]:
    """Kernels in Python of the operators that choose how to normalise, as on CUDA.

    Args:
        cudnn: Whether the device is one that cuDNN runs on.
    """

    def batch_norm(image: torch.Tensor, *rest: Any) -> Any:
        *parameters, training, momentum, epsilon, _ = rest
        if not (cudnn and _runs_in_cudnn(image, parameters, training)):
            operator: Any = aten._batch_norm_impl_index.default
            return operator._op_dk(_COMPOSITE, image, *rest)
        image, parameters = image.contiguous(memory_format=_format(image)), list(map(_contiguous, parameters))
        results = aten.cudnn_batch_norm(image, *parameters, training, momentum, epsilon)
        return (*results, _CUDNN)

    return {aten._batch_norm_impl_index.default: batch_norm, aten.group_norm.default: _group_norm}


def fused_normalisations() -> dict[Any, dict[Any, Callable[..., Any]]]:
    """Kernels in Python, by operator and dispatch key, of normalisations that are one operator on CUDA only.

    With a kernel for the CPU, autograd records the operator, and its backward, whole, and tracing finds no
    decomposition later.
    """
    operator: Any = aten._fused_rms_norm.default

    def with_data(*args: Any) -> Any:
        return operator._op_dk(_COMPOSITE, *args)

    def no_parts(*_args: Any, **_named: Any) -> Any:
        return NotImplemented

    return {operator: {torch._C.DispatchKey.CPU: with_data, _COMPOSITE: no_parts}}


def _runs_in_cudnn(image: torch.Tensor, parameters: Sequence[torch.Tensor | None], training: bool) -> bool:
    weight, bias, mean, variance = parameters
    if weight is None or bias is None or not torch.backends.cudnn.enabled or image.dim() < 3:
        return False
    if torch.bfloat16 in (image.dtype, weight.dtype) or not image.numel():
        return False
    if image.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    tracked = mean is not None and variance is not None
    if not tracked and not (mean is None and variance is None and training):
        return False
    most = _MOST_IN_TRAINING if training else _MOST_IN_EVALUATION
    return image.shape[0] <= most


def _format(image: torch.Tensor) -> torch.memory_format:
    return torch._prims_common.suggest_memory_format(image)


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def _group_norm(image: torch.Tensor, groups: int, *rest: Any, **named: Any) -> Any:
    operator: Any = aten.group_norm.default
    return operator._op_dk(_COMPOSITE, image.contiguous(), groups, *rest, **named)
