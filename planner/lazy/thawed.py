"""Parameters that were frozen when a module was planned, and train later: gradual unfreezing."""

import weakref

import torch

_Place = tuple[weakref.ref[torch.nn.Module], str]
"""A module, and the name of a parameter of its own."""


class Thawed:
    """Whether a module trains all that it trained when it was planned, and more.

    A module of which two parts are frozen by turns never does, so that one plan does not follow upon another
    without end. Parameters are not held, nor are there weak references to them: with some they could not be
    exchanged in place (``torch.utils.swap_tensors``).

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
        """How many tensors train beside those that were trained; 0 where some of the latter do not."""
        thawed = sum(map(_trains, self._frozen))
        return thawed if thawed and all(map(_trains, self._trained)) else 0


def _trains(place: _Place) -> bool:
    part, name = place
    module = part()
    parameter = None if module is None else module._parameters.get(name)
    return parameter is not None and parameter.requires_grad
