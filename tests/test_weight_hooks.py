"""Hooks on the gradients of weights take what they take: planning runs them on its copies."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner

LOGGED: list[float] = []
SAVED: list[torch.Tensor] = []


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _clip(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))


def _mask(model: nn.Sequential) -> None:
    kept = torch.rand(128, 64) > 0.5
    model[0].weight.register_hook(lambda gradient: gradient * kept)


def _decay(model: nn.Sequential) -> None:
    model[0].weight.register_hook(lambda gradient: gradient + 0.1 * model[0].weight.detach())


def _in_place(model: nn.Sequential) -> None:
    model[2].weight.register_hook(lambda gradient: gradient.mul_(2))


def _save(model: nn.Sequential) -> None:
    model[0].weight.register_hook(SAVED.append)


def _log(model: nn.Sequential) -> None:
    model[0].weight.register_hook(lambda gradient: LOGGED.append(gradient.norm().item()))


@pytest.mark.heavy
@pytest.mark.parametrize("samples", [1, 256])
@pytest.mark.parametrize("hook", [_clip, _mask, _decay, _in_place, _save, _log])
def test_hooks_on_gradients_of_weights_are_predicted(
    hook: Callable[[nn.Sequential], None], samples: int
) -> None:
    model, x = _model(), torch.randn(samples, 64)
    hook(model)
    LOGGED.clear()
    SAVED.clear()
    plan = planner.plan(model, (x,), loss=_loss, budget="min", solver="sqrt_n")
    assert not LOGGED, "planning wrote to the user's list"
    assert not SAVED, "planning wrote to the user's list"
    report = planner.verify(model, (x,), plan=plan, loss=_loss, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes


def test_a_hook_that_asks_for_values_is_left_out_and_said() -> None:
    model, x = _model(), torch.randn(8, 64)
    _log(model)
    LOGGED.clear()
    plan = planner.plan(model, (x,), loss=_loss, budget="100%", solver="none")
    assert not LOGGED
    assert [note for note in plan.notes if "0.weight asks for its values" in note]
    _loss(plan.apply(model)(x)).backward()
    assert len(LOGGED) == 1
