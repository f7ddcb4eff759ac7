"""What a step changes in place before the backward of the graph that reads or made it, as it was recorded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner._torch.fake import storage_key, without_modes
from planner._torch.joint import aot_metadata
from planner._torch.tensors import is_wrapper
from planner._torch.versions import Watched
from planner.compiled.graph_hook import GraphHook
from planner.graph.trace import TracedGraph


class WrittenInPlace(GraphHook):
    """Compares how often PyTorch says that tensors were changed, after the forward and before the backward.

    They are not held for it, as that would change for how long the step holds them. Changes that PyTorch does
    not count show by the operators that wrote, and, in a step that runs with data, by their bytes.

    Args:
        watch: Returns what tells whether the memory of a tensor has been written to since, and whether it has
            been resized.

    Attributes:
        inputs: Positions of the inputs that were changed.
        outputs: Positions of the results that were changed, among those of the traced graph.
        uncounted_inputs, uncounted_outputs: Those of which PyTorch counts no change.
    """

    watches = True

    def __init__(self, watch: Callable[[torch.Tensor], Callable[[], tuple[bool, bool]]]) -> None:
        self._watch = watch
        self.inputs, self.outputs = set[int](), set[int]()
        self.uncounted_inputs, self.uncounted_outputs = set[int](), set[int]()
        self._positions: dict[int, int] = {}
        self._probed: list[Watched] = []
        self._counted = set[int]()  # results of which a step without plan counts changes

    def probed(self, results: Sequence[Any]) -> None:
        """Note what the graph returned that ran as it is: where traced graphs write to that, by ``.data``
        too, PyTorch counts it."""
        tensors = {i: result for i, result in enumerate(results) if isinstance(result, torch.Tensor)}
        with without_modes():
            self._probed.append(Watched(tensors))

    def take_counted(self, other: "WrittenInPlace") -> None:
        """Let what was noted of another one's graph be that of this one's, which is the same."""
        self._probed = other._probed

    def on_traced(self, traced: TracedGraph) -> None:
        self._positions = aot_metadata.output_positions(traced.joint, traced.forward_outputs)
        with without_modes():
            self._counted.update(i for watched in self._probed for i in watched.written())

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        values = dict(enumerate(args))
        node.register_prehook(self._looks(values, self.inputs, self.uncounted_inputs, lambda _: True))

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None:
            handed_out = {i: results[position] for i, position in self._positions.items()}
            counts = lambda i: self._positions[i] in self._counted  # noqa: E731
            node.register_prehook(self._looks(handed_out, self.outputs, self.uncounted_outputs, counts))
        return results

    def _looks(
        self, values: Mapping[int, Any], found: set[int], uncounted: set[int], counts: Callable[[int], bool]
    ) -> Callable[[Any], None]:
        """A hook that adds to what was found the keys of the tensors that were changed.

        Args:
            counts: Whether a step without a plan counts changes to one that is changed.
        """
        with without_modes():
            tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
            counted = Watched(tensors)
            plain = {
                key: (storage_key(tensor), self._watch(tensor))
                for key, tensor in tensors.items()
                if tensor.layout is torch.strided and not is_wrapper(type(tensor))
            }

        def look(_gradients: Any) -> None:
            with without_modes():
                changed, written = set(counted.written()), set[int]()
                known = filter(counts, changed & plain.keys())
                memory = {plain[key][0] for key in known}  # which others may view
                for key, (at, is_changed) in plain.items():
                    is_written, is_resized = is_changed()
                    if is_resized:  # there is nothing any more that eager could read
                        changed.add(key)
                    elif is_written and at not in memory:
                        written.add(key)
            found.update(changed, written)
            uncounted.update(written)

        return look
