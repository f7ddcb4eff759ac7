"""A training step whose models are wrapped in ``DistributedDataParallel`` runs inside the wrappers' forwards.

A wrapper prepares its reduction in its own forward. A step that called the wrapped module itself would get
gradients that the ranks do not share, and nothing would say so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def without_wrapper(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of a ``DistributedDataParallel``; another one as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def without_wrappers(value: Any) -> Any:
    """The same of a model, or of a tuple, list or mapping of models."""
    if isinstance(value, torch.nn.Module):
        return without_wrapper(value)
    if isinstance(value, Mapping):
        return {name: without_wrapper(model) for name, model in value.items()}
    return sequence_like(value, map(without_wrapper, value))


def sequence_like(value: list[Any] | tuple[Any, ...], parts: Iterable[Any]) -> Any:
    """A list, tuple or named tuple, as a value is, of other parts."""
    if isinstance(value, list):
        return list(parts)
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


def call_inside(
    models: Sequence[torch.nn.Module],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The result of ``call(*args, **kwargs)``, made inside the forwards of those models that are wrapped.

    Args:
        models: Models of which some may be a ``DistributedDataParallel``.
        call: The function that runs there.
        args, kwargs: Its arguments; the wrappers move them to their device.
    """
    wrapper = next((model for model in models if isinstance(model, DistributedDataParallel)), None)
    if wrapper is None:
        return call(*args, **kwargs)
    others = [model for model in models if model is not wrapper]
    module = wrapper.module

    def then(*args: Any, **kwargs: Any) -> Any:
        wrapper.module = module
        return call_inside(others, call, args, kwargs)

    wrapper.module = _InPlace(module, then)
    try:
        return wrapper(*args, **kwargs)
    finally:
        wrapper.module = module


class _InPlace(torch.nn.Module):
    """The module that a wrapper calls in place of its own, with the same parameters, buffers and parts."""

    def __init__(self, module: torch.nn.Module, then: Callable[..., Any]) -> None:
        super().__init__()
        own = vars(module)
        vars(self).update({name: own[name] for name in ("_parameters", "_buffers", "_modules")})
        self._then = then

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._then(*args, **kwargs)
