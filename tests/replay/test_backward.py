"""What the backward of a followed step lets go of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.errors import InputsChanged
from planner.graph.replay import rng
from planner.parallel.units import Units
from planner.replay import backward, noted
from planner.replay.backward import Backward
from planner.replay.calls import why_not_noted
from planner.replay.follow import FollowedStep
from planner.replay.noted import Held, Recipe
from planner.replay.slots import Slots

aten = torch.ops.aten


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("is_noted", [True, False])
def test_on_another_path_what_no_noted_call_makes_stays(
    followed: bool, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "graph_is_kept", lambda: False)
    program = SimpleNamespace(makers={0: (3,)}, bits={}, asking_order={5: 0}, free={5: (0,)}, runs={})
    loaded: Any = SimpleNamespace(calls=[], program=program, masks=set(), bits=frozenset(), in_order=[5])
    slots = Slots(loaded)
    slots.tensors[0] = torch.ones(2)
    slots.kept.add(0)
    if is_noted:
        slots.recipes[3] = Recipe(torch.neg, [], {}, None, ())
    step = Backward(loaded, slots)
    step.followed = followed
    step.after_save(5)
    assert (slots.tensors[0] is None) == (followed or is_noted)


def test_a_mask_whose_bits_are_gone_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order a slot is let go of once no save waits for it, if it can be made again."""
    monkeypatch.setattr(backward, "graph_is_kept", lambda: False)
    program = SimpleNamespace(makers={0: (3,)}, bits={0: 1}, asking_order={5: 0, 6: 1}, free={}, runs={})
    loaded: Any = SimpleNamespace(calls=[], program=program, masks={0}, bits=frozenset({1}), in_order=[5, 6])
    loaded.tell_once, program.written_over = (lambda *_: None), ()
    slots = Slots(loaded)
    slots.unpack[0] = torch.clone
    slots.tensors = {0: torch.ones(2), 1: torch.ones(2)}
    step = Backward(loaded, slots)
    step.followed, step.waiting[0] = True, 0
    step.before_save(6)
    slots.tensors[1] = None
    step.after_save(6, 0)
    assert slots.tensors[0] is not None
    slots.tensors[1] = torch.ones(2)
    step.after_save(6, 0)
    assert slots.tensors[0] is None


@pytest.mark.parametrize("trains", [False, True])
def test_statistics_across_ranks_that_the_plan_does_not_update_are_noticed(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No schema says that these are written. A normalisation in training that runs again reads none."""
    monkeypatch.setattr(noted, "alias_inside", torch.Tensor.detach)  # it is for use inside of a dispatch mode
    x, mean, variance = torch.ones(2, 3), torch.zeros(3), torch.ones(3)
    held = [Held(mean), Held(variance)]
    program = SimpleNamespace(makers={}, bits={}, room=[0])
    loaded: Any = SimpleNamespace(
        calls=[None], operators=[], saves=[], program=program, masks=set(), bits=frozenset()
    )
    step = FollowedStep(loaded, Units([]))
    args = [Held(x), None, None, *held, trains, 0.1, 1e-5]
    step.slots.recipes[0] = Recipe(aten.native_batch_norm.default, args, {}, None, ())
    step.unplanned_call(aten.batch_norm_update_stats.default, (x, mean, variance, 0.1), {}, ())
    if trains:
        held[0].read()
    else:
        with pytest.raises(InputsChanged, match="changed in place"):
            held[0].read()


def test_a_sparse_tensor_in_a_list_is_not_noted() -> None:
    given = [torch.eye(2).to_sparse()]
    assert why_not_noted(torch.ops.aten.cat.default, (given,), {}) == "it reads a sparse tensor"


def test_numbers_are_drawn_again_on_the_device_that_a_call_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of such a call tells it. What is from outside PyTorch may draw from Python's
    generators, and a seed on the CPU, too."""
    monkeypatch.setattr(rng, "generator_state", lambda *_: torch.empty(0))
    library = torch.library.Library("planner_test_draws", "FRAGMENT")
    library.define("draw(Tensor x) -> Tensor")
    cuda, x = {"device": torch.device("cuda", 1)}, torch.ones(2, device="meta")
    assert rng.state_before(aten.rand.default, ([3],), cuda)[1:] == ("cuda", 1)
    assert rng.state_before(aten.rand_like.default, (torch.ones(2),), cuda)[1:] == ("cuda", 1)
    assert rng.state_before(aten.rand.default, ([3],), {})[1:] == ("cpu", None)
    assert rng.state_before(aten.native_dropout.default, (x, 0.1, True), {})[1:] == ("meta", None)
    foreign = torch.ops.planner_test_draws.draw.default
    assert rng.state_before(foreign, (x,), {})[1:] == ("meta+cpu+python", None)
