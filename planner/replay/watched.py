"""A step whose plan drops nothing: it runs as it is, and what autograd saves is compared with the plan.

No call of an operator is counted. Hooks on saved tensors take ten microseconds each all the same, so that of
many steps some are looked at.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner._torch.autograd import hooks_on_saved_tensors
from planner._torch.tensors import without_history
from planner.replay.follow import unpack
from planner.replay.steps import Steps
from planner.replay.units import ROOT, Units

FIRST, EACH = 8, 16
"""How many steps are looked at first, and one of how many later."""


class WatchedStep:
    """The saved tensors of one forward.

    Attributes:
        count: How many there were.
    """

    def __init__(self, steps: Steps, units: Units) -> None:
        self._planned, self._units = steps.saved_bytes, units
        self._steps, self.count = steps, 0
        self._larger: tuple[int, int] | None = None  # bytes of one, and those that were planned

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds of a tensor that it saves."""
        if not self._units.in_hooks:  # what these save is not counted
            planned = self._planned[self.count] if self.count < len(self._planned) else 0
            if planned and tensor.layout is torch.strided:
                size = tensor.untyped_storage().nbytes()
                if size > planned:
                    self._larger = size, planned
            self.count += 1
        tensor = without_history(tensor)  # the node of a result would hold itself
        return tensor, tensor._version

    @property
    def other_path(self) -> bool:
        """Whether the forward was not as planned."""
        return self.count != len(self._planned)

    def tell_of_more(self) -> None:
        """Say what takes more than planned."""
        if self.count > len(self._planned):
            self._steps.tell_once(
                "path",
                f"autograd saves {self.count:,} tensors in the forward, and {len(self._planned):,} are "
                "planned: it took a path that the plan has not seen, and the step may take more than "
                "predicted. Plan the step as it is trained, with inputs that lead along this path, or apply "
                "with on_new_shape='replan'",
            )
        elif self._larger is not None and not self.other_path:
            self._steps.tell_of_larger(*self._larger)


def watched(
    steps: Steps, forward: Callable[[], Any], units: Iterable[torch.nn.Module]
) -> tuple[Any, WatchedStep | None]:
    """Run a forward as it is; returns its output, and what watched it.

    Under hooks of others on saved tensors, as ``save_on_cpu``, nothing does: ours would take their place.
    """
    if hooks_on_saved_tensors() is not None:
        return forward(), None
    step = WatchedStep(steps, Units((module, ROOT) for module in units))
    with torch.autograd.graph.saved_tensors_hooks(step.pack, unpack), step._units.watched():
        output = forward()
    return output, step
