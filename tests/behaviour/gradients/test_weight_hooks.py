"""Hooks on the gradients of weights take what they take: planning runs them on its copies."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn as nn

import planner
from tests.small import Classifier, both_loss, classifier, logits_loss

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
@pytest.mark.parametrize(
    ("hook", "samples"), [(_clip, 1), (_mask, 256), (_decay, 1), (_in_place, 256), (_save, 1), (_log, 256)]
)
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


def _calls(model: nn.Module, steps: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor) -> list[str]:
    """Which hooks each step called, on weights before and after accumulation and on what is read."""
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: called.append(f"{name} {gradient.shape}"))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: called.append(f"{name} after {p.grad.shape}")
        )
    for step, loss in enumerate(steps):
        called.append(f"step {step}")
        inner = x * 2
        inner.register_hook(lambda gradient: called.append(f"x {gradient.shape}"))
        loss(model(inner)).backward()
        model.zero_grad()
    return called


class _Apart(Classifier):
    """The second output is of the input alone."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.body(x.detach())), "extra": self.extra(x.repeat(1, 4))}


@pytest.mark.parametrize("build", [Classifier, _Apart])
@pytest.mark.parametrize("loss", [pytest.param(logits_loss, marks=pytest.mark.heavy), both_loss])
def test_hooks_are_not_called_where_no_gradient_arrives(
    build: type[nn.Module], loss: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model, x = build().train(), classifier()[1][0].requires_grad_()
    steps = [logits_loss, loss, logits_loss]
    expected = _calls(copy.deepcopy(model), steps, x)
    planner.plan(model, (x * 2,), loss=loss, budget="100%", solver="none").apply(model)
    assert _calls(model, steps, x) == expected
