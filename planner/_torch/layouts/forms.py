"""Layouts: a result, given the arguments, with the strides that a kernel gives it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import (
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)

from planner._torch.layouts.elementwise_strides import strides_of

Layout = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""A result, given the arguments, with the strides of the kernel's."""


def contiguous(result: torch.Tensor, _: tuple[Any, ...]) -> torch.Tensor:
    return _new(result, torch.contiguous_format)


def suggested_by(position: int) -> Layout:
    """Contiguous, or channels-last where this argument is."""
    return lambda result, args: (
        _new(result, suggest_memory_format(args[position]))
        if result.dim() == args[position].dim()
        else result
    )


def rolled(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Channels-last where the argument is, unless it is rolled flat, or by whole turns."""
    image, shifts, dims = args[0], args[1], args[2] if len(args) > 2 else ()
    whole = any(shift % max(image.shape[dim], 1) == 0 for shift, dim in zip(shifts, dims, strict=False))
    return contiguous(result, args) if not dims or whole else suggested_by(0)(result, args)


def made_contiguous(position: int) -> Layout:
    """As this argument, where it is contiguous or channels-last, strides of dimensions of one included."""

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        source = args[position]
        if result.shape != source.shape:
            return result
        memory_format = suggest_memory_format(source)
        if source.is_contiguous(memory_format=memory_format):
            return _strided(result, source.stride())
        return _new(result, memory_format)

    return laid_out


def normalised_as(*positions: int) -> Layout:
    """Contiguous, or channels-last where the last of these arguments is, as batch normalisations see it.

    One can be both, where dimensions have one element. It is then taken for contiguous, if it is dense and
    all of these arguments suggest the same format.
    """

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        sources = [args[position] for position in positions]
        if result.shape != sources[-1].shape:
            return result
        dense = [*map(_dense_format, sources)]
        suggested = [*map(suggest_memory_format, sources)]
        agreed = None not in dense and len(set(suggested)) == 1
        return _new(result, dense[-1] if agreed and dense[-1] is not None else suggested[-1])

    return laid_out


def _dense_format(tensor: torch.Tensor) -> torch.memory_format | None:
    formats = (torch.contiguous_format, *_CHANNELS_LAST.get(tensor.dim(), ()))
    return next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)


_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def normalised_backward(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    memory_format = _format_of_batch_norm_gradient(args[0], args[1], args[7])
    if result.shape != args[1].shape:
        return result
    if memory_format is torch.preserve_format:
        return _strided(result, args[1].stride())
    return _new(result, memory_format)


def like(position: int) -> Layout:
    """As ``empty_like`` of this argument."""

    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        source = args[position]
        if result.shape != source.shape:
            return result
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(source)
        return _strided(result, source.stride() if dense else torch.empty_like(source).stride())

    return laid_out


def element_by_element(operator: Any) -> Layout:
    def laid_out(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        strides = strides_of(operator, args)
        return result if strides is None else _strided(result, strides)

    return laid_out


def _new(result: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """A result with the strides of a new tensor."""
    if not all(isinstance(size, int) for size in result.shape):
        return result.contiguous(memory_format=memory_format)
    contiguous = memory_format is torch.contiguous_format
    strides = make_contiguous_strides_for if contiguous else make_channels_last_strides_for
    return _strided(result, strides(result.shape))


def _strided(result: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    if tuple(strides) == result.stride():
        return result
    made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return made.copy_(result)


def _format_of_batch_norm_gradient(
    gradient: torch.Tensor, image: torch.Tensor, training: bool
) -> torch.memory_format:
    """The format of the input's gradient of PyTorch's own batch normalisation, as in ``Normalization.cu``.

    Args:
        gradient: The gradient of the result.
        image: The input.
        training: Whether it was normalised by its own mean and variance.
    """
    last = image.dim() == 5 and image.is_contiguous(memory_format=torch.channels_last_3d)
    if not training or not (last or _by_channels(image)):
        return torch.contiguous_format
    if _by_channels(image) and _by_channels(gradient):
        return torch.preserve_format
    return suggest_memory_format(image)


def _by_channels(image: torch.Tensor) -> bool:
    if image.is_contiguous():
        return image.stride(1) == 1
    return image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)
