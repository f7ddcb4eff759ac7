"""Parameters that were frozen when a module was planned, and train later: gradual unfreezing."""

import weakref

import torch


class Thawed:
    """Whether a module trains all that it trained when it was planned, and more.

    A module of which two parts are frozen by turns never does, so that one plan does not follow upon another
    without end. Parameters are not held.

    Args:
        model: The module, as it is planned.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        self._trained = [weakref.ref(p) for p in parameters if p.requires_grad]
        self._frozen = [weakref.ref(p) for p in parameters if not p.requires_grad]

    def count(self) -> int:
        """How many tensors train beside those that were trained; 0 where some of the latter do not."""
        thawed = sum(_trains(reference) for reference in self._frozen)
        return thawed if thawed and all(map(_trains, self._trained)) else 0


def _trains(reference: "weakref.ref[torch.nn.Parameter]") -> bool:
    parameter = reference()
    return parameter is not None and parameter.requires_grad
