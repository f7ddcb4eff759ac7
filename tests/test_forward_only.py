"""Graphs behind a graph break of which the step differentiates nothing run as they are, without a warning."""

import pytest
import torch
import torch.nn as nn

import planner
from planner.verification.measure import measure_peak
from tests.side_by_side import Layers, assert_same, left_by, no_plan_warnings, plan_of


class WithFeatures(nn.Module):
    """Hands out, besides its loss, what code behind a graph break makes, as Accelerate casts outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers(2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body.run(x)
        loss = y.square().mean()
        torch._dynamo.graph_break()
        return {"loss": loss, "features": y.double()}


def _train(model: nn.Module) -> None:
    for size in (64, 32, 48):
        model(torch.ones(size, 32))["loss"].backward()
        model.zero_grad()


@pytest.mark.heavy
def test_they_run_as_they_are() -> None:
    torch.manual_seed(0)
    model, twin = WithFeatures(), WithFeatures()
    twin.load_state_dict(model.state_dict())
    x = torch.ones(64, 32)
    plan = plan_of(model, (x,), outputs="dropped")
    assert len(plan.forward_only) == 1
    plan.apply(model)
    with no_plan_warnings():
        ours = left_by(model, _train)
    assert_same(ours, left_by(twin, _train))
    peak = measure_peak(lambda: model(x)["loss"].backward(), "cpu").peak_bytes
    assert peak == pytest.approx(plan.predicted.dynamic_peak_bytes, rel=0.005)
    model.zero_grad()
    with (
        pytest.warns(planner.PlanWarning, match="uses outputs that the planned step leaves unused"),
        pytest.raises(planner.PlanMismatch, match="did not use"),
    ):
        model(x)["features"].sum().backward()
