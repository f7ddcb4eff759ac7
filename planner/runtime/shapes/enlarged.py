"""Arguments at the largest sizes that a plan is for, with what they hold repeated."""

from collections.abc import Iterable
from typing import Any

import torch

from planner.training_step.step import map_tensors


def repeated(
    args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Iterable[tuple[int, ...] | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose tensors are as large as they may be.

    What is repeated leads a forward along the same path: a mask of which all is set stays one.

    Args:
        args, kwargs: The arguments.
        shapes: For each tensor among them, in order, the shape that it is to have; None where it stays. It
            stays too where that shape has other dimensions, or smaller ones.
    """
    wanted = iter(shapes)

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        shape = next(wanted)
        if shape is None or len(shape) != tensor.dim() or 0 in tensor.shape:
            return tensor
        if any(size > most for size, most in zip(tensor.shape, shape, strict=True)):
            return tensor
        larger = tensor.detach()
        for dim, size in enumerate(shape):
            if size != larger.shape[dim]:
                indices = torch.arange(size, device=larger.device) % larger.shape[dim]
                larger = larger.index_select(dim, indices)
        return larger.requires_grad_(tensor.requires_grad)

    enlarged: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(enlarge, (args, kwargs))
    return enlarged
