"""What was planned is freed once the user lets go of it: models and inputs."""

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo.guards import CheckFunctionManager
from torch.fx import GraphModule

import planner
from planner._torch.tracing.let_go import Captured
from planner.heap import nothing_set_aside
from tests.side_by_side import Layers, layers, plan_of
from tests.small import Broken

pytestmark = pytest.mark.heavy

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


def _for_an_optimizer(model: nn.Module, x: torch.Tensor) -> None:
    """Which knows the model, as the loss does."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output / len(list(model.parameters()))

    planner.auto_checkpoint(model, optimizer=optimizer, loss=loss, **BY)
    for batch in (x, x[:48], torch.cat([x, x])):
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


_STEP = planner.step(lambda model, x: model(x), **BY)


def _by_a_step_that_others_take_too(model: nn.Module, x: torch.Tensor) -> None:
    for batch in (x, x[:48]):
        _STEP(model, batch).backward()
    assert _STEP.plan is not None


USES = [_applies, _for_an_optimizer, _by_a_step_that_others_take_too]
OTHERS = [_plans, _does_not_fit, _first_call, _removes, _verifies, _plans_a_step]


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.parametrize(
    ("use", "build"),
    [
        (USES[0], Layers),
        *(pytest.param(use, Layers, marks=pytest.mark.heavy) for use in OTHERS),
        *(
            pytest.param(use, Broken, marks=pytest.mark.heavy)
            for use in [USES[0], OTHERS[2], OTHERS[4], _in_regions]
        ),
    ],
)
def test_models_and_inputs(use: Callable[[nn.Module, torch.Tensor], None], build: type[nn.Module]) -> None:
    model, (x,), _ = layers(build)
    x = x.clone()
    use(model, x)
    batch, planned, weight = weakref.ref(x), weakref.ref(model), weakref.ref(next(model.parameters()))
    with nothing_set_aside():  # planning sets aside what is there before it, for as long as these tests run
        del x
        gc.collect()
        assert batch() is None
        del model
        gc.collect()
    assert planned() is None
    assert weight() is None


@pytest.mark.parametrize("use", [_applies, _in_regions])
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_what_was_compiled_of_code_behind_a_break(use: Callable[[nn.Module, torch.Tensor], None]) -> None:
    """Dynamo hangs it on the code of the user's, or of a library's, which stays."""

    def graphs() -> int:
        model, (x,), _ = layers(Broken)
        use(model, x)
        del model, x
        with nothing_set_aside():
            gc.collect()
            return sum(GraphModule in type(found).__mro__ for found in gc.get_objects())

    first = graphs()
    assert graphs() <= first


def test_guards_of_a_capture_that_failed_do_not_hinder_it(monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished, code = object.__new__(CheckFunctionManager), Layers(1)
    waiting = weakref.finalize(code, functools.partial(unfinished.invalidate, obj_str="code"))
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    model, (x,), _ = layers(Broken)
    _plans(model, x)
    gc.collect()
    assert not found
    assert waiting.alive


def test_the_collector_may_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it ends then leaves the list that is looked through."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    callback, before = Layers(1), gc.get_threshold()
    captured = Captured(callback)
    ends = [Layers(1) for _ in range(1000)]
    for waits in ends:
        weakref.finalize(waits, int)
    del waits

    def end_one(*_: Any) -> None:
        del ends[:1]

    gc.callbacks.append(end_one)
    gc.set_threshold(1)
    try:
        del callback
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(end_one)
    assert len(ends) < 1000
    assert not found
    assert captured is not None
