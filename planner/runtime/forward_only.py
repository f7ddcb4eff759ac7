"""Graphs of a planned forward that the planned step does not differentiate.

A graph after a graph break is one if it makes only outputs that the loss does not use. It runs without the
plan. If a gradient arrives all the same, the backward is right, but the plan does not count its memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.training_step.step import differentiable_outputs


def warns_if_differentiated(
    run: Callable[..., Any], warn: Callable[[str], None]
) -> Callable[..., Sequence[Any]]:
    """The same function, with a warning if a gradient reaches its results.

    Args:
        run: Runs a graph.
        warn: Called with the warning, once.
    """
    warned = False

    def arrived(_gradient: torch.Tensor) -> None:
        nonlocal warned
        if not warned:
            warned = True
            warn(
                "the loss uses outputs that the planned step leaves unused; the graphs that make them run "
                "without the plan, and the step may take more than predicted. Plan with the loss that you "
                "train with (loss=)"
            )

    def watched(*args: Any) -> Sequence[Any]:
        results: Sequence[Any] = run(*args)
        if not warned and torch.is_grad_enabled():
            passed_on = {id(x) for x in args}  # an input that is returned is not this graph's result
            for tensor in differentiable_outputs(results):
                if tensor.grad_fn is not None and id(tensor) not in passed_on:
                    tensor.register_hook(arrived)
        return results

    return watched
