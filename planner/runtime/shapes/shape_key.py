"""What tells one call's shapes from another's, looked up at every step."""

from typing import Any

import torch

from planner._torch import pytree


def shape_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Shapes of all tensors among arguments, and which require gradients, to look up at every call; 1 or 2
    microseconds."""
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
    if value is None or isinstance(value, bool | int | float | str):
        return None
    return tuple(_laid_out(x) for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
