"""What a step changes in place before the backward of the graph that reads or made it, as it was recorded."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner._torch.fake import without_modes
from planner._torch.joint import aot_metadata
from planner._torch.versions import Watched
from planner.compiled.graph_hook import GraphHook
from planner.graph.trace import TracedGraph


class WrittenInPlace(GraphHook):
    """Compares how often PyTorch says that tensors were changed, after the forward and before the backward.

    They are not held for it, as that would change for how long the step holds them.

    Attributes:
        inputs: Positions of the inputs that were changed.
        outputs: Positions of the results that were changed, among those of the traced graph.
    """

    watches = True

    def __init__(self) -> None:
        self.inputs: set[int] = set()
        self.outputs: set[int] = set()
        self._positions: dict[int, int] = {}

    def on_traced(self, traced: TracedGraph) -> None:
        self._positions = aot_metadata.output_positions(traced.joint, traced.forward_outputs)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        node.register_prehook(_looks(dict(enumerate(args)), self.inputs))

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None:
            handed_out = {i: results[position] for i, position in self._positions.items()}
            node.register_prehook(_looks(handed_out, self.outputs))
        return results


def _looks(values: dict[int, Any], found: set[int]) -> Callable[[Any], None]:
    """A hook that adds to what was found the keys of the tensors that were changed."""
    with without_modes():
        watched = Watched({key: value for key, value in values.items() if isinstance(value, torch.Tensor)})
    return lambda _gradients: found.update(watched.written())
