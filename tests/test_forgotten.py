"""A planned module is freed when nothing of the user's refers to it, as where models are tried one by one."""

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.heap import nothing_set_aside
from tests.side_by_side import Layers


class _Breaks(Layers):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        if x.sum() > 1e9:
            x = x * 2
        return super().run(x)


def _trained(model: nn.Module, **options: Any) -> weakref.ref[nn.Module]:
    """Planned at its first call, for an optimizer and a loss that know it; three shapes."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output / len(list(model.parameters()))

    planner.auto_checkpoint(model, budget="min", solver="sqrt_n", optimizer=optimizer, loss=loss, **options)
    for size in (16, 8, 32):
        loss(model(torch.ones(size, 32))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weakref.ref(model)


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


_STEP = planner.step(_step, budget="min", solver="sqrt_n")


def _stepped(model: nn.Module) -> weakref.ref[nn.Module]:
    """Trained by a planned function that goes on to be used for others."""
    for size in (16, 8, 32):
        _STEP(model, torch.ones(size, 32)).backward()
    assert _STEP.plan is not None
    assert pickle.loads(pickle.dumps(model))._planner_steps == {}
    return weakref.ref(model)


def _planned(model: nn.Module) -> weakref.ref[nn.Module]:
    planner.plan(model, torch.ones(16, 32), budget="min", solver="sqrt_n")
    return weakref.ref(model)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "use",
    [
        lambda: _planned(Layers(2)),
        lambda: _trained(Layers(2)),
        lambda: _trained(Layers(3), regions=["layers.*"]),
        lambda: _trained(_Breaks(2)),
        lambda: _stepped(Layers(2)),
    ],
    ids=["planned", "trained", "by regions", "in several graphs", "by a planned step"],
)
def test_a_planned_model_is_freed(use: Callable[[], weakref.ref[nn.Module]]) -> None:
    model = use()
    with nothing_set_aside():  # planning sets aside what is there before it, for as long as these tests run
        gc.collect()
    assert model() is None
