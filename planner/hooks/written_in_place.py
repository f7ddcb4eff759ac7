"""Finds the inputs and results of a graph that a step changes in place before the graph's backward.

Used while a step is recorded.
"""

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
    """Compares PyTorch's version counters of tensors after the forward with those before the backward.

    It does not hold the tensors: that would change how long the step holds them. A change that PyTorch does
    not count shows by the operator that wrote, or, in a step that runs with data, by the tensor's bytes.

    Args:
        watch: Given a tensor, returns a function that tells whether its memory was written to since, and
            whether it was resized.

    Attributes:
        inputs: Positions of the inputs that were changed.
        outputs: Positions of the results that were changed, among those of the traced graph.
        uncounted_inputs, uncounted_outputs: Those of them whose change PyTorch does not count.
    """

    watches = True

    def __init__(self, watch: Callable[[torch.Tensor], Callable[[], tuple[bool, bool]]]) -> None:
        self._watch = watch
        self.inputs, self.outputs = set[int](), set[int]()
        self.uncounted_inputs, self.uncounted_outputs = set[int](), set[int]()
        self._positions: dict[int, int] = {}
        self._probed: list[Watched] = []
        self._counted = set[int]()  # results whose changes PyTorch counts in a step without a plan

    def probed(self, results: Sequence[Any]) -> None:
        """Note the results of the graph as it ran untraced.

        PyTorch counts every write of a traced graph, those through ``.data`` too. Here it counts as it does
        in a step without a plan.
        """
        tensors = {i: result for i, result in enumerate(results) if isinstance(result, torch.Tensor)}
        with without_modes():
            self._probed.append(Watched(tensors))

    def take_counted(self, other: "WrittenInPlace") -> None:
        """Take over the notes that another hook made of the same graph."""
        self._probed = other._probed

    def on_traced(self, traced: TracedGraph) -> None:
        self._positions = aot_metadata.output_positions(traced.joint, traced.forward_outputs)
        with without_modes():
            self._counted.update(i for watched in self._probed for i in watched.written())

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        values = dict(enumerate(args))
        node.register_prehook(self._comparison(values, self.inputs, self.uncounted_inputs, lambda _: True))

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None:
            handed_out = {i: results[position] for i, position in self._positions.items()}
            counts = lambda i: self._positions[i] in self._counted  # noqa: E731
            node.register_prehook(self._comparison(handed_out, self.outputs, self.uncounted_outputs, counts))
        return results

    def _comparison(
        self, values: Mapping[int, Any], found: set[int], uncounted: set[int], counts: Callable[[int], bool]
    ) -> Callable[[Any], None]:
        """A hook on the backward that adds the keys of changed tensors to ``found``.

        Args:
            values: The inputs or results that may have been changed, by key.
            found: Keys of changed tensors.
            uncounted: Keys of those whose change PyTorch does not count.
            counts: Whether PyTorch counts the changes of a key's tensor in a step without a plan.
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
                memory = {plain[key][0] for key in known}  # other keys may view the same memory
                for key, (at, is_changed) in plain.items():
                    is_written, is_resized = is_changed()
                    if is_resized:  # nothing is left there that eager could read
                        changed.add(key)
                    elif is_written and at not in memory:
                        written.add(key)
            found.update(changed, written)
            uncounted.update(written)

        return look
