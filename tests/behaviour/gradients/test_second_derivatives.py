"""Gradients of a planned module that are differentiated again: what runs afterwards, and what verify sees."""

import copy

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanWarning
from tests.side_by_side import assert_same, left_by, plan_of

pytestmark = pytest.mark.heavy


class Critic(nn.Module):
    """Smooth, without dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        body = [(nn.Linear(16, 64), nn.Softplus(), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)]
        self.body = nn.Sequential(*(layer for part in body for layer in part), nn.Dropout(dropout))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _critic() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Critic(), torch.randn(64, 16, requires_grad=True)
    twin = copy.deepcopy(model)
    plan = plan_of(model, (x,), loss=torch.sum)
    assert plan.graphs[0].recomputed
    return plan.apply(model), twin, x


@pytest.mark.parametrize("what", ["output", "several", "other calls"])
def test_after_a_second_derivative_calls_of_its_kind_run_as_they_are_and_are_exact(what: str) -> None:
    model, twin, x = _critic()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        outputs = model(x).flatten()
        if what == "several":
            slopes = [torch.autograd.grad(o, x, create_graph=True)[0].square().sum() for o in outputs[:2]]
            loss = slopes[0] + slopes[1]
        else:
            (slope,) = torch.autograd.grad(outputs.mean(), x, create_graph=True)
            others = outputs if what == "output" else model(x.detach()) - 2 * model(x.detach() + 1)
            loss = slope.square().sum() + others.square().mean()
        loss.backward()
        return [loss]

    with pytest.warns(PlanWarning, match=r"last bits\. From now on such calls run as they are"):
        loop(model)
    assert_same(left_by(model, loop), left_by(twin, loop))
    assert "CompiledFunction" not in type(model(x).grad_fn).__name__
    assert "CompiledFunction" in type(model(x.detach()).grad_fn).__name__  # of another kind


def test_verify_looks_at_a_step_by_the_plan_whose_gradient_is_differentiated() -> None:
    model, _, x = _critic()

    def loss(output: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return slope.square().sum()

    with pytest.warns(PlanWarning, match="From now on such calls run as they are"):
        report = planner.verify(model, (x,), loss=loss, repeats=0)
    assert report.gradients_equal
    assert report.measured_dynamic_peak_bytes > report.baseline_measured_dynamic_peak_bytes


def test_a_second_derivative_by_weights_of_other_memory_is_an_error() -> None:
    model, _, x = _critic()
    loss = model(x).sum()
    weight = model.get_parameter("head.weight")
    weight.data = weight.data * 2
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(planner.PlanMismatch, match="inputs or parameters have been changed since"):
        slope.square().sum().backward()
