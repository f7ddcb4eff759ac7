"""Gradients that are there already when a step begins, which no plan counts that was made for none."""

import weakref
from collections.abc import Callable, Iterable

import torch


class EarlierGradients:
    """Whether parameters have gradients, asked at each step.

    Parameters are exchanged for others between steps, and some never get a gradient. So all of them are
    looked at, as they were found the last time; they are found anew where one is gone or has a gradient, or
    where the first is another.

    Args:
        parameters: Finds them.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
        self._find = parameters
        self._found: list[weakref.ref[torch.nn.Parameter]] = []

    def are_there(self) -> bool:
        """Whether a parameter that trains has one."""
        first = next(iter(self._find()), None)
        known = bool(self._found) and self._found[0]() is first
        if known and not any(map(_has_gradient_or_is_gone, self._found)):
            return False
        self._found = [weakref.ref(p) for p in self._find()]
        return any(_has_gradient(p) for p in self._find())


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.is_leaf and parameter.grad is not None


def _has_gradient_or_is_gone(reference: "weakref.ref[torch.nn.Parameter]") -> bool:
    parameter = reference()
    return parameter is None or _has_gradient(parameter)
