"""Parameters that take more than when a module was planned: replaced by longer ones, or added to."""

import weakref

import torch


class Grown:
    """How much more the parameters of a module take than when it was planned.

    Training Gaussian splats replaces parameters by longer ones every few hundred steps; other loops add
    layers. As in :class:`planner.lazy.thawed.Thawed` no parameter is held.

    Args:
        model: The module, as it is planned.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._look_for_parts()
        self.planned_bytes = self._taken()

    def now(self) -> int | None:
        """The bytes of all parameters, where these are more than when it was planned; else None."""
        if self._children != self._count_of_children():
            self._look_for_parts()
        taken = self._taken()
        return taken if taken > self.planned_bytes else None

    def _look_for_parts(self) -> None:
        model = self._model()
        self._parts = [] if model is None else [weakref.ref(part) for part in model.modules()]
        self._children = self._count_of_children()

    def _count_of_children(self) -> int:
        return sum(len(part._modules) for reference in self._parts if (part := reference()) is not None)

    def _taken(self) -> int:
        sizes = {
            id(parameter): parameter.numel() * parameter.itemsize
            for reference in self._parts
            if (part := reference()) is not None and part._parameters
            for parameter in part._parameters.values()
            if parameter is not None
        }
        return sum(sizes.values())
