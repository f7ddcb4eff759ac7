"""A step that takes more memory as captured than as written runs so: the least is never above it."""

import pytest
import torch
import torch.nn as nn

import planner
from planner.user_plan import Plan

pytestmark = pytest.mark.heavy


class FixedPoint(nn.Module):
    """A deep equilibrium model: iterates by Anderson's method without gradients, then once with them.

    The history is shifted in place, which a graph computes as a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def step(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.inner(z) * 0.5 + x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = torch.zeros(4, *x.shape)
            moved = torch.zeros(4, *x.shape)
            z = torch.zeros_like(x)
            for _ in range(6):
                found.copy_(found.roll(1, 0))
                moved.copy_(moved.roll(1, 0))
                found[0] = self.step(z, x)
                moved[0] = found[0] - z
                products = torch.einsum("kbd,lbd->bkl", moved, moved) + 1e-2 * torch.eye(4)
                weights = torch.softmax(products.sum(-1), -1)
                z = torch.einsum("bk,kbd->bd", weights, found)
        return self.head(self.step(z, x)).square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_a_step_that_is_least_as_written_runs_so(budget: str) -> None:
    torch.manual_seed(0)
    model, x = FixedPoint(), torch.randn(256, 32)
    with pytest.warns(planner.PlanWarning, match="runs as written"):
        plan = planner.plan(model, (x,), budget=budget, costs="roofline")
    plan = Plan.loads(plan.dumps())
    assert plan.as_written
    assert plan.predicted == plan.baseline
    assert any("runs as written" in note for note in plan.notes)
    assert plan.summary()
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.graphs
def test_the_least_budget_is_never_above_the_step_without_a_plan() -> None:
    model, x = FixedPoint(), torch.randn(256, 32)
    step = planner.prepare(model, (x,), costs="roofline")
    with pytest.raises(planner.InfeasibleBudget, match="the step without a plan") as raised:
        step.plan("60%")
    least = raised.value.minimum_bytes
    with pytest.warns(planner.PlanWarning, match="runs as written"):
        plan = step.plan(least)
    assert plan.whole_step is not None
    assert plan.whole_step.total_bytes == least
    assert plan.baseline_whole_step == plan.whole_step
