"""Parameters that are not as they were when their module was planned: larger, or trained by now."""

import weakref

import torch

_Place = tuple[weakref.ref[torch.nn.Module], str]
"""A module, and the name of a parameter of its own."""


class Grown:
    """Whether the parameters of a module take more bytes than when it was planned.

    Training Gaussian splats replaces parameters by longer ones every few hundred steps; other loops add
    layers. As in :class:`Thawed`, no parameter is held.

    Args:
        model: The module, as it is planned.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._look_for_parts()
        self.planned_bytes = self._taken()

    def now(self) -> int | None:
        """The bytes of all parameters if these are more than when it was planned; else None."""
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


class Thawed:
    """Whether a module trains all parameters that it trained when it was planned, and frozen ones too.

    A module that freezes one of two parts by turns never does: else it would be planned again without end.
    It has no weak references to parameters, as ``torch.utils.swap_tensors`` refuses tensors that have some.

    Args:
        model: The module, as it is planned.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        seen = dict[int, tuple[bool, _Place]]()
        for part in model.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    seen.setdefault(id(parameter), (parameter.requires_grad, (weakref.ref(part), name)))
        self._trained = [place for trains, place in seen.values() if trains]
        self._frozen = [place for trains, place in seen.values() if not trains]

    def count(self) -> int:
        """How many tensors train that were frozen; 0 where some that trained do so no more."""
        thawed = sum(map(_trains, self._frozen))
        return thawed if thawed and all(map(_trains, self._trained)) else 0


def _trains(place: _Place) -> bool:
    part, name = place
    module = part()
    parameter = None if module is None else module._parameters.get(name)
    return parameter is not None and parameter.requires_grad
