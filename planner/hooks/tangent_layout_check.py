"""A warning where the gradient of an output has other strides than the backward was traced for."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner._torch.joint import aot_metadata
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.tangent_layouts import has_steps, memory_steps
from planner.graph.trace import TracedGraph


class TangentLayoutCheck(GraphHook):
    """Compares the strides of the gradients that a planned graph gets with the planned ones.

    Args:
        warn: Called, once, if they differ.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._expected: Mapping[int, tuple[int, ...]] = {}
        self._warned = False

    def on_traced(self, traced: TracedGraph) -> None:
        gradients = aot_metadata.gradients_of_nodes(traced.joint, traced.forward_outputs)
        self._expected = {i: g.stride() for i, g in gradients.items() if has_steps(g)}
        self.watches = bool(self._expected)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        if not self._warned:
            node.register_prehook(self._look)

    def _look(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        for i, strides in self._expected.items():
            gradient = gradients[i]
            if gradient is None or gradient.stride() == strides or not has_steps(gradient):
                continue
            steps = memory_steps(gradient)
            if self._warned or 0 in steps or steps == memory_steps(gradient, strides):
                continue
            self._warned = True
            self._warn(
                f"a gradient of shape {tuple(gradient.shape)} has other strides than in the planned "
                "step: it is copied, and gradients may differ in the last bits from those without a plan. "
                "Plan again with loss= a callable that computes the loss you train with"
            )


def hook(context: HookContext) -> TangentLayoutCheck:
    """A hook for every graph; it warns the user."""
    return TangentLayoutCheck(context.warn)
