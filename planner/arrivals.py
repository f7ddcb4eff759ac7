"""Gradients that arrive at the outputs of a graph, and how they lie in memory.

A backward that is traced for gradients that lie otherwise than eager's sums over them in another order.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner import _torch_joint
from planner.graph_hooks import GraphHook, TracedGraph
from planner.joint import JointGraph


class Arrivals:
    """Watches the gradients of one graph's outputs.

    Attributes:
        awaited: Outputs that could have a gradient.
        received: Outputs that got one.
        layouts: Of outputs whose gradients lay otherwise in memory than they do, by position: the gradients'
            dimensions, those of the largest steps first.
    """

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self.received: set[int] = set()
        self.layouts: dict[int, tuple[int, ...]] = {}
        self._arrived: dict[int, list[tuple[int, ...]]] = {}

    def watch(self, output: int, tensor: torch.Tensor, *, of_input: bool) -> None:
        """Watch an output.

        Args:
            output: Its position.
            tensor: The output, as a tensor that nothing inside the graph uses.
            of_input: Whether it is a view of an input; these are taken as without a plan.
        """
        self.awaited.add(output)
        steps = None if of_input else _steps(tensor)
        tensor.register_hook(functools.partial(self._receive, output, steps))

    def _receive(self, output: int, steps: tuple[int, ...] | None, gradient: torch.Tensor) -> None:
        self.received.add(output)
        arrived = _steps(gradient)
        if steps is not None and 0 not in arrived and arrived != steps:
            self.layouts[output] = _order(gradient)
            self._arrived.setdefault(output, []).append(arrived)

    def relaid(self, joint: JointGraph) -> int:
        """How often a gradient arrived that a traced backward may take a copy of, since it was traced for one
        that lies otherwise, or for that of a result which several outputs look at."""
        traced = _torch_joint.gradients_of_outputs(joint.graph)
        return sum(
            i not in traced or steps != _steps(traced[i])
            for i, arrived in self._arrived.items()
            for steps in arrived
        )


class Expected(GraphHook):
    """Looks at the gradients that a planned graph gets, whether they lie in memory as planned.

    Args:
        warn: Told, once, if one does not.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._expected: Mapping[int, tuple[int, ...]] = {}
        self._told = False

    def on_traced(self, traced: TracedGraph) -> None:
        gradients = _torch_joint.gradients_of_nodes(traced.joint, traced.forward_outputs)
        self._expected = {i: g.stride() for i, g in gradients.items() if _has_steps(g)}
        self.watches = bool(self._expected)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        if not self._told:
            node.register_prehook(self._look)

    def _look(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        for i, strides in self._expected.items():
            gradient = gradients[i]
            if gradient is None or gradient.stride() == strides or not _has_steps(gradient):
                continue
            steps = _steps(gradient)
            if self._told or 0 in steps or steps == _steps(gradient, strides):
                continue
            self._told = True
            self._warn(
                f"a gradient of shape {tuple(gradient.shape)} lies otherwise in memory than in the planned "
                "step: it is copied, and gradients may differ in the last bits from those without a plan. "
                "Plan again with loss= a callable that computes the loss you train with"
            )


def _has_steps(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and all(
        isinstance(n, int) for n in (*tensor.shape, *tensor.stride())
    )


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    steps = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], -tensor.shape[d], d)))


def _steps(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element: a tensor's own, or those given."""
    if tensor.layout is not torch.strided:
        return ()
    found = tensor.stride() if strides is None else strides
    return tuple(step for step, size in zip(found, tensor.shape, strict=True) if size > 1)
