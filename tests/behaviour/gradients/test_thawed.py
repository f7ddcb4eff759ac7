"""Parameters that are thawed while a module trains under auto_checkpoint."""

import copy

import pytest
import torch
from torch import nn

import planner
from planner.runtime.install import installed_plan

pytestmark = pytest.mark.heavy


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def _train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def _same(ours: list[torch.Tensor | None], eager: list[torch.Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, eager, strict=True)
    )


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_gradual_unfreezing_is_planned_again(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = _layers(), torch.randn(64, 32)
    for layer in (0, 1):
        model[layer].requires_grad_(False)
    eager = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="90%", costs="roofline")
    plans = []
    for layer in (None, 1, 0):
        for module in (model, eager):
            if layer is not None:
                module[layer].requires_grad_(True)
        for _ in range(2):
            assert _same(_train(model, x), _train(eager, x))
        plans.append(installed_plan(model))
    assert plans[0] is not plans[1] is not plans[2]
    assert capsys.readouterr().err.count("2 parameters train that were frozen") == 2


def test_what_is_frozen_by_turns_is_not_planned_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = _layers(), torch.randn(64, 32)
    planner.auto_checkpoint(model, budget="150%", costs="roofline")
    for turn in range(6):
        model[0].requires_grad_(turn % 2 == 0)
        model[3].requires_grad_(turn % 2 == 1)
        _train(model, x)
    assert "were frozen" not in capsys.readouterr().err


@pytest.mark.parametrize("thaws", [True, False], ids=["thawed", "gradients are there"])
def test_what_cannot_be_planned_again_trains_by_its_plan(thaws: bool) -> None:
    """A generator cannot be copied, and the module is copied to plan."""
    model, x = _layers(), torch.randn(64, 32)
    model[0].requires_grad_(not thaws)
    eager = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n", loss=lambda y: y.square().mean())
    assert _same(_train(model, x), _train(eager, x))
    model.numbers = iter(number for number in range(3))
    for module in (model, eager):
        module.requires_grad_(True)
    with pytest.warns(planner.PlanWarning, match="cannot be planned again .*: it trains by its old plan"):
        model(x).square().mean().backward()
    eager(x).square().mean().backward()
    gradients = [[p.grad for p in module.parameters()] for module in (model, eager)]
    assert _same(*gradients)


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_nothing_trains_at_the_first_call() -> None:
    """As a discriminator that a generator trains by."""
    model, x = _layers().requires_grad_(False), torch.randn(64, 32, requires_grad=True)
    eager = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="min", optimizer="adamw", costs="roofline")
    for trains in (False, True):
        gradients = []
        for module in (model, eager):
            x.grad = None
            gradients.append([*_train(module.requires_grad_(trains), x), x.grad])
        assert _same(*gradients)
    assert installed_plan(model) is not None


def test_a_first_call_that_fails_is_not_the_last_to_be_planned() -> None:
    model = planner.auto_checkpoint(_layers(), budget="min", costs="roofline")
    with pytest.warns(planner.PlanWarning, match="cannot be planned"), pytest.raises(RuntimeError):
        model(torch.randn(64, 31))
    _train(model, torch.randn(64, 32))
    assert installed_plan(model) is not None
