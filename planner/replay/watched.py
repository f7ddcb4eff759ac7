"""A step whose plan drops nothing: it runs as it is, and its saved tensors are compared with the plan.

No operator call is counted. A hook on a saved tensor still takes ten microseconds, so after the first steps
only some are watched.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner._torch.autograd import backward_keeps_graph, hooks_on_saved_tensors
from planner.compiled.calls import KEPT
from planner.parallel.units import ROOT, Units
from planner.replay.follow import as_it_is, unpack
from planner.replay.loaded_program import LoadedProgram

FIRST_STEPS, ONE_IN = 8, 16
"""The number of first steps that are all watched, and the number of later steps of which one is."""


class WatchedStep:
    """Counts the saved tensors of one forward.

    Attributes:
        count: Their number so far.
        in_forward: Whether the forward has not ended.
    """

    def __init__(self, loaded: LoadedProgram, units: Units) -> None:
        self._planned, self._units = loaded.saved_bytes, units
        self._loaded, self.count = loaded, 0
        self._larger: tuple[int, int] | None = None  # a saved tensor's bytes, and its planned bytes
        self.in_forward = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Count a tensor that autograd saves; returns it, with its version."""
        if not self._units.in_hooks:  # saves of fully_shard's hooks are not counted
            planned = self._planned[self.count] if self.count < len(self._planned) else 0
            if planned and tensor.layout is torch.strided:
                size = tensor.untyped_storage().nbytes()
                if size > planned:
                    self._larger = size, planned
            self.count += 1
        return as_it_is(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that a node gets; warns of a backward that holds its graph."""
        if not self.in_forward and backward_keeps_graph():
            self._loaded.tell_once("kept", KEPT)
        return unpack(packed)

    @property
    def other_path(self) -> bool:
        """Whether the forward was not as planned."""
        return self.count != len(self._planned)

    def tell_of_more(self) -> None:
        """Warn of more or larger saved tensors than planned."""
        if self.count > len(self._planned):
            self._loaded.tell_once(
                "path",
                f"autograd saves {self.count:,} tensors in the forward, and {len(self._planned):,} are "
                "planned: it took a path that the plan has not seen, and the step may take more than "
                "predicted. Plan the step as it is trained, with inputs that lead along this path, or apply "
                "with on_new_shape='replan'",
            )
        elif self._larger is not None and not self.other_path:
            self._loaded.tell_of_larger(*self._larger)


def watched(
    loaded: LoadedProgram, forward: Callable[[], Any], units: Iterable[torch.nn.Module]
) -> tuple[Any, WatchedStep | None]:
    """Run a forward as it is; returns its output, and the watched step.

    Under hooks of others on saved tensors, as ``save_on_cpu``, it is None: ours would replace those.
    """
    if hooks_on_saved_tensors() is not None:
        return forward(), None
    step = WatchedStep(loaded, Units((module, ROOT) for module in units))
    with torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack), step._units.watched():
        output = forward()
    step.in_forward = False
    return output, step
