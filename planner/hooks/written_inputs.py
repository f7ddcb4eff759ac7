"""Which inputs of a graph a step changes in place before the graph's backward, as the recorded step shows."""

from typing import Any

import torch

from planner._torch import versions
from planner._torch.fake import without_modes
from planner.compiled.graph_hook import GraphHook


class WrittenInputs(GraphHook):
    """Compares how often PyTorch says that inputs were changed, after the forward and before the backward.

    Inputs are not held for it, as that would change for how long the step holds them.

    Attributes:
        positions: Those of the inputs that were changed.
    """

    watches = True

    def __init__(self) -> None:
        self.positions: set[int] = set()

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        with without_modes():
            seen = [
                (i, versions.counter_of(a), version)
                for i, a in enumerate(args)
                if isinstance(a, torch.Tensor) and (version := versions.version_of(a)) is not None
            ]

        def look(_gradients: Any) -> None:
            for position, counter, version in seen:
                tensor = counter()
                if tensor is not None and versions.version_of(tensor) != version:
                    self.positions.add(position)

        node.register_prehook(look)
