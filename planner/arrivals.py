"""Gradients that arrive at the outputs of a graph, and how they lie in memory.

A backward that is traced for gradients that lie otherwise than eager's sums over them in another order.
"""

import functools

import torch

from planner import _torch_joint
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

    def watch(self, output: int, tensor: torch.Tensor) -> None:
        """Watch an output: a tensor that nothing inside the graph uses."""
        self.awaited.add(output)
        tensor.register_hook(functools.partial(self._receive, output, _steps(tensor)))

    def _receive(self, output: int, steps: tuple[int, ...], gradient: torch.Tensor) -> None:
        self.received.add(output)
        arrived = _steps(gradient)
        if 0 not in arrived and arrived != steps:
            self.layouts[output] = _order(gradient)
            self._arrived.setdefault(output, []).append(arrived)

    def relaid(self, joint: JointGraph) -> int:
        """How often a gradient arrived that a traced backward takes a copy of, since it was traced for one
        that lies otherwise. Outputs that are views of inputs are taken as without a plan."""
        traced = _torch_joint.gradients_of_outputs(joint.graph)
        shared = _torch_joint.has_shared_outputs(joint.graph)
        return sum(
            steps != _steps(traced[i]) if i in traced else shared
            for i, arrived in self._arrived.items()
            for steps in arrived
        )


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    steps = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], -tensor.shape[d], d)))


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.strided:
        return ()
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
