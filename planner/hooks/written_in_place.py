"""What a step changes in place before the backward of the graph that reads or made it, as it was recorded."""

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner._torch.fake import is_fake, without_modes
from planner._torch.joint import aot_metadata
from planner._torch.tensors import is_wrapper
from planner._torch.versions import Watched, version_of
from planner.compiled.graph_hook import GraphHook
from planner.graph.trace import TracedGraph


class WrittenInPlace(GraphHook):
    """Compares how often PyTorch says that tensors were changed, after the forward and before the backward.

    They are not held for it, as that would change for how long the step holds them. Changes that PyTorch does
    not count show by the operators that wrote, and, in a step that runs with data, by their bytes.

    Args:
        writes: How often operators have written to the memory of a tensor so far.

    Attributes:
        inputs: Positions of the inputs that were changed.
        uncounted: Those of which PyTorch counts no change.
        outputs: Positions of the results that were changed, among those of the traced graph.
    """

    watches = True

    def __init__(self, writes: Callable[[torch.Tensor], int]) -> None:
        self._writes = writes
        self.inputs: set[int] = set()
        self.uncounted: set[int] = set()
        self.outputs: set[int] = set()
        self._positions: dict[int, int] = {}

    def on_traced(self, traced: TracedGraph) -> None:
        self._positions = aot_metadata.output_positions(traced.joint, traced.forward_outputs)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        node.register_prehook(_looks(dict(enumerate(args)), self.inputs))
        with without_modes():
            seen = {
                i: (weakref.ref(t), version_of(t), self._writes(t), _digest(t))
                for i, t in enumerate(args)
                if isinstance(t, torch.Tensor) and t.layout is torch.strided and not is_wrapper(type(t))
            }
        node.register_prehook(lambda _gradients: self._look(seen))

    def _look(self, seen: dict[int, tuple[Any, int | None, int, int]]) -> None:
        with without_modes():
            for i, (there, version, writes, digest) in seen.items():
                tensor = there()
                if tensor is None or version_of(tensor) != version:
                    continue
                if self._writes(tensor) != writes or _digest(tensor) != digest:
                    self.inputs.add(i)
                    self.uncounted.add(i)

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None:
            handed_out = {i: results[position] for i, position in self._positions.items()}
            node.register_prehook(_looks(handed_out, self.outputs))
        return results


def _digest(tensor: torch.Tensor) -> int:
    """Of the bytes of a tensor that code outside of PyTorch could write to: one with data, on the CPU."""
    if is_fake(tensor) or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return 0
    return zlib.crc32(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)


def _looks(values: dict[int, Any], found: set[int]) -> Callable[[Any], None]:
    """A hook that adds to what was found the keys of the tensors that were changed."""
    with without_modes():
        watched = Watched({key: value for key, value in values.items() if isinstance(value, torch.Tensor)})
    return lambda _gradients: found.update(watched.written())
