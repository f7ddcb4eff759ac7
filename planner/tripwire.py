"""Outputs that a plan takes for unused say so when a gradient arrives at them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.errors import PlanMismatch


def with_tripwires(compiled: Callable[..., Any], outputs: Sequence[int]) -> Callable[..., Any]:
    """Outputs that the planned loss does not use must not get a gradient unnoticed.

    AOTAutograd would give them a full gradient of zeros, and parameters that only they depend on a
    gradient of zeros where eager leaves None. They are cut off instead, and say so when used.
    """
    if not outputs:
        return compiled

    def run(*args: Any) -> Any:
        results = list(compiled(*args))
        anchor = next((a for a in args if isinstance(a, torch.Tensor) and a.requires_grad), None)
        if anchor is not None:
            for index in outputs:
                results[index] = _Tripwire.apply(anchor, results[index])  # type: ignore[no-untyped-call]
        return results

    return run


class _Tripwire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise PlanMismatch(
            "a gradient arrives at an output of the model that the planned loss did not use. Plan again with "
            "loss= a callable that computes the loss you train with, or planner.remove(model)"
        )
