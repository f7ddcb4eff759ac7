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

    It does not hold the tensors: that would change how long the step holds them. Some changes, as those
    through ``.data``, increment no version counter: they are called *uncounted* here, and `watch` finds them.

    Args:
        watch: Given a tensor, returns a function that tells whether its memory was written to since, and
            whether its storage was resized. It looks at the operators that ran or, in a step that runs with
            data, at the tensor's bytes.

    Attributes:
        inputs: Positions of the inputs that were changed.
        outputs: Positions of the results that were changed, among those of the traced graph.
        uncounted_inputs, uncounted_outputs: Those of them whose change is uncounted.
    """

    watches = True

    def __init__(self, watch: Callable[[torch.Tensor], Callable[[], tuple[bool, bool]]]) -> None:
        self._watch = watch
        self.inputs, self.outputs = set[int](), set[int]()
        self.uncounted_inputs, self.uncounted_outputs = set[int](), set[int]()
        self._positions: dict[int, int] = {}  # by output of the traced graph: its position in the results
        self._probed: list[Watched] = []
        self._counted = set[int]()  # positions of results whose changes are counted in a step without a plan

    def probed(self, results: Sequence[Any]) -> None:
        """Note the results of the graph as it ran untraced, before it is traced.

        In a traced graph every write increments the version counter, those through ``.data`` too. Untraced it
        is incremented as in a step without a plan.
        """
        tensors = {i: result for i, result in enumerate(results) if isinstance(result, torch.Tensor)}
        with without_modes():
            self._probed.append(Watched(tensors))

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
        """Look at tensors now; returns a hook for the backward, which looks again and notes the changed ones.

        Args:
            values: The inputs or results that may be changed, by key.
            found: A set to which the hook adds the keys of changed tensors.
            uncounted: A set to which it adds those whose change is uncounted.
            counts: Whether the changes of a key's tensor are counted in a step without a plan.
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
                memory = {plain[key][0] for key in known}  # a write that is counted for one view, for all
                for key, (at, is_changed) in plain.items():
                    is_written, is_resized = is_changed()
                    if is_resized:  # the contents are gone: no plan may read them again
                        changed.add(key)
                    elif is_written and at not in memory:
                        written.add(key)
            found.update(changed, written)
            uncounted.update(written)

        return look
