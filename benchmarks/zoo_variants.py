"""Other steps of the same models: with one sample, images whose channels come last, or other dtypes."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Variant:
    """What is changed of a model and its inputs, and what their step runs under."""

    module: Callable[[nn.Module], nn.Module] = lambda module: module
    inputs: Change = lambda inputs: inputs
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def first_samples(inputs: Any, count: int = 1) -> Any:
    """The inputs of a model, with the first samples only: of tensors as long as the first of them."""
    lengths = [t.shape[0] for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()]
    return _of_tensors(inputs, lambda t: t[:count].clone() if t.dim() and t.shape[0] == lengths[0] else t)


def _channels_last(inputs: Any) -> Any:
    return _of_tensors(
        inputs, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


def _of_dtype(dtype: torch.dtype) -> Variant:
    def cast(inputs: Any) -> Any:
        return _of_tensors(inputs, lambda t: t.to(dtype) if t.is_floating_point() else t)

    return Variant(lambda module: module.to(dtype), cast)


def _of_tensors(inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs)


VARIANTS = {
    "one-sample": Variant(inputs=first_samples),
    "channels-last": Variant(
        lambda module: module.to(memory_format=torch.channels_last),
        _channels_last,  # type: ignore[call-overload]
    ),
    "autocast": Variant(around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "bfloat16": _of_dtype(torch.bfloat16),
    "float64": _of_dtype(torch.float64),
}
