"""Gradients that are there already when a step begins, which no plan counts that was made for none."""

import weakref
from collections.abc import Callable, Iterable

import torch


class EarlierGradients:
    """Whether parameters have gradients, asked at each step.

    Parameters are exchanged for others between steps, and some never get a gradient. So all of them are
    looked at, in the modules that had some the last time; these are found anew where one is gone or has a
    gradient, or where the first is another. Parameters themselves have no weak references to them: with
    some they could not be exchanged in place (``torch.utils.swap_tensors``).

    Args:
        modules: Finds the modules.
    """

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._find = modules
        self._found: list[weakref.ref[torch.nn.Module]] = []

    def are_there(self) -> bool:
        """Whether a parameter that trains has one."""
        first = next(filter(_has_parameters, self._find()), None)
        known = bool(self._found) and self._found[0]() is first
        if known and not any(map(_has_gradient_or_is_gone, self._found)):
            return False
        modules = list(filter(_has_parameters, self._find()))
        self._found = [weakref.ref(module) for module in modules]
        return any(map(_has_gradient, modules))


def _has_parameters(module: torch.nn.Module) -> bool:
    return bool(module._parameters)


def _has_gradient(module: torch.nn.Module) -> bool:
    return any(
        p is not None and p.requires_grad and p.is_leaf and p.grad is not None
        for p in module._parameters.values()
    )


def _has_gradient_or_is_gone(reference: "weakref.ref[torch.nn.Module]") -> bool:
    module = reference()
    return module is None or _has_gradient(module)
