"""Strides of results on CUDA, captured on tensors without data on the CPU.

PyTorch's shape functions ask for the device where kernels differ by it. Here the answer is CUDA.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _meta_registrations
from torch._prims_common import suggest_memory_format

from planner._torch.layouts.shape_functions import Correction, cpu_stands_for_cuda
from planner._torch.patches import replaced

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@contextlib.contextmanager
def layouts_of_cuda(*, cudnn: bool) -> Iterator[None]:
    """A context in which results on the CPU have the strides that a CUDA device's kernels give them.

    Args:
        cudnn: Whether the device is one that cuDNN runs on.
    """
    hint: Any = _meta_registrations.device_hint
    with (
        replaced(_meta_registrations, {"device_hint": _as_cuda(hint)}),
        convolutions_of_cuda(cudnn=cudnn),
        cpu_stands_for_cuda(_CORRECTIONS, (cudnn, torch.backends.cudnn.enabled)),
    ):
        yield


@contextlib.contextmanager
def convolutions_of_cuda(*, cudnn: bool) -> Iterator[None]:
    """A context in which results of convolutions without data have the strides of a CUDA device's kernels.

    Args:
        cudnn: Whether the device is one that cuDNN runs on.
    """

    def of_convolution(image: torch.Tensor, weight: torch.Tensor, _backend: object) -> torch.memory_format:
        return _format_of_cudnn(image, weight) if cudnn else torch.contiguous_format

    with replaced(torch._C, {"_conv_determine_backend_memory_format": of_convolution}):
        yield


def _as_cuda(hint: Callable[[Any], str]) -> Callable[[Any], str]:
    def device_hint(tensor: Any) -> str:
        kind = hint(tensor)
        return "cuda" if kind == "cpu" else kind

    return device_hint


def _format_of_cudnn(image: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The format of a convolution's results: channels-last where one operand is, not in double precision."""
    wanted = _CHANNELS_LAST.get(weight.dim())
    if wanted is None or torch.float64 in (image.dtype, weight.dtype) or not torch.backends.cudnn.enabled:
        return torch.contiguous_format
    if wanted in (suggest_memory_format(image), suggest_memory_format(weight)):
        return wanted
    return torch.contiguous_format


def _contiguous_below(channels: int) -> Correction:
    """A result is contiguous where an image has few channels, as PyTorch says of interpolations."""

    def correct(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        image = args[0]
        return result.contiguous() if image.dim() == 4 and image.shape[1] < channels else result

    return correct


def _statistics(results: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Statistics of tensors in half precision are in single precision."""
    image = args[0]
    if image.dtype not in _HALF:
        return results
    output, *statistics = results[:3]
    single = [t if t.dtype is torch.float32 else torch.empty_like(t, dtype=torch.float32) for t in statistics]
    return (output, *single, *results[3:])


def _batch_statistics(results: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Statistics in evaluation have an element for each channel; on the CPU they have none."""
    image, channels = args[0], args[0].shape[1]
    mean, deviation = results[1:3]
    if not mean.numel() and channels:
        mean, deviation = image.new_empty(channels), image.new_empty(channels)
    return _statistics((results[0], mean, deviation, *results[3:]), args)


def _no_buffer(results: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...]:
    return results[0], results[1].new_empty(0)


_CORRECTIONS: dict[Any, Correction] = {
    aten.upsample_nearest2d.default: _contiguous_below(4),
    aten.native_layer_norm.default: _statistics,
    aten.native_batch_norm.default: _batch_statistics,
    aten._native_batch_norm_legit.default: _batch_statistics,
    aten._native_batch_norm_legit.no_stats: _batch_statistics,
    aten._native_batch_norm_legit_functional.default: _batch_statistics,
    aten._batch_norm_with_update.default: _statistics,
    aten._batch_norm_with_update_functional.default: _statistics,
    aten.log_sigmoid_forward.default: _no_buffer,
}
