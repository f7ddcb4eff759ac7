"""What the backward of a followed step lets go of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.replay import backward
from planner.replay.backward import Backward
from planner.replay.noted import Recipe
from planner.replay.slots import Slots


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("noted", [True, False])
def test_on_another_path_what_no_noted_call_makes_stays(
    followed: bool, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "graph_is_kept", lambda: False)
    program = SimpleNamespace(makers={0: (3,)}, bits={}, asking_order={5: 0}, free={5: (0,)}, runs={})
    loaded: Any = SimpleNamespace(calls=[], program=program, masks=set(), bits=frozenset(), in_order=[5])
    slots = Slots(loaded)
    slots.tensors[0] = torch.ones(2)
    slots.kept.add(0)
    if noted:
        slots.recipes[3] = Recipe(torch.neg, [], {}, None, ())
    step = Backward(loaded, slots)
    step.followed = followed
    step.after_save(5)
    assert (slots.tensors[0] is None) == (followed or noted)
