"""The arguments of a call: a key of their shapes, and larger arguments that repeat their elements."""

from collections.abc import Iterable
from typing import Any

import torch

from planner._torch import pytree
from planner.training_step.step import map_tensors


def shape_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A key of the shapes of all tensors among arguments, and of which require gradients.

    It is made at every call, in 1 or 2 microseconds.
    """
    key = [_laid_out(a) if isinstance(a, torch.Tensor) else _nested(a) for a in args]
    if kwargs:
        key += [(k, _laid_out(a) if isinstance(a, torch.Tensor) else _nested(a)) for k, a in kwargs.items()]
    return tuple(key)


def _laid_out(tensor: torch.Tensor) -> Any:
    laid_out = tensor.layout is not torch.strided or tensor.is_contiguous()
    if laid_out and not tensor.requires_grad:
        return tensor.shape
    return tensor.shape, None if laid_out else tensor.stride(), tensor.requires_grad


def _nested(value: Any) -> Any:
    """The tensors inside an argument and where they are in it; None where there are none."""
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, dict):
        places: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        places = enumerate(value)
    else:
        return tuple(_laid_out(x) for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
    found = [(at, _laid_out(x) if isinstance(x, torch.Tensor) else _nested(x)) for at, x in places]
    return tuple(pair for pair in found if pair[1] is not None) or None


def repeated(
    args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Iterable[tuple[int, ...] | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose tensors are enlarged to given shapes by repeating their elements.

    Repeated elements lead a forward along the same path: a mask whose elements are all set stays one.

    Args:
        args, kwargs: The arguments.
        shapes: For each tensor among them, in order, its new shape; None to leave it. A tensor is left, too,
            where the shape has another number of dimensions, or a smaller one.
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
