"""What was planned is freed once the user lets go of it: models and inputs."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import Layers, layers, plan_of
from tests.small import Broken

BY: Any = {"budget": "min", "solver": "sqrt_n"}


def _plans(model: nn.Module, x: torch.Tensor) -> None:
    plan_of(model, (x,))


def _does_not_fit(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(planner.InfeasibleBudget):
        planner.plan(model, (x,), budget="1%", solver="sqrt_n")


def _applies(model: nn.Module, x: torch.Tensor) -> None:
    plan_of(model, (x,)).apply(model)
    for batch in (x, x[:48], x[:32]):
        model(batch).backward()


def _first_call(model: nn.Module, x: torch.Tensor) -> None:
    planner.auto_checkpoint(model, **BY)
    model(x).backward()


def _removes(model: nn.Module, x: torch.Tensor) -> None:
    _applies(model, x)
    planner.remove(model)


def _verifies(model: nn.Module, x: torch.Tensor) -> None:
    assert planner.verify(model, (x,), plan=plan_of(model, (x,)), repeats=0).ok


def _in_regions(model: nn.Module, x: torch.Tensor) -> None:
    plan_of(model, (x,), regions=["first.0", "first.1"]).apply(model)
    model(x).backward()


def _plans_a_step(model: nn.Module, x: torch.Tensor) -> None:
    step = planner.step(lambda model, x: model(x), **BY)
    step(model, x).backward()


USES = [_plans, _does_not_fit, _applies, _first_call, _removes, _verifies, _in_regions, _plans_a_step]


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.parametrize("build", [Layers, pytest.param(Broken, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("use", USES)
def test_models_and_inputs(use: Callable[[nn.Module, torch.Tensor], None], build: type[nn.Module]) -> None:
    if use is _in_regions and build is Layers:
        return
    model, (x,), _ = layers(build)
    x = x.clone()
    use(model, x)
    batch, planned, weight = weakref.ref(x), weakref.ref(model), weakref.ref(next(model.parameters()))
    gc.unfreeze()  # what the fixture that keeps the heap small has set aside
    del x
    gc.collect()
    assert batch() is None
    del model
    gc.collect()
    assert planned() is None
    assert weight() is None
