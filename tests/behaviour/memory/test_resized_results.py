"""Results that become larger after they are made, as `out=` an empty tensor does."""

import torch
from torch import nn

import planner


def test_a_module_that_resizes_its_results_takes_what_is_predicted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Tanh(), nn.CrossMapLRN2d(3), nn.Tanh())
    args = (torch.rand(2, 3, 4, 4),)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().sum()

    plan = planner.plan(model, args=args, budget="min", costs="roofline", loss=loss)
    report = planner.verify(model, args=args, plan=plan, loss=loss, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes <= report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes <= report.baseline_predicted_dynamic_peak_bytes


class Grown(nn.Module):
    """Makes a small tensor larger and keeps it for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        grown = torch.empty(2).resize_(y.shape).copy_(y.detach())
        return self.last((y * grown).sin()).square().mean()


def test_what_grows_after_it_was_made_takes_what_is_predicted() -> None:
    torch.manual_seed(0)
    model, args = Grown(), (torch.randn(256, 64),)
    plan = planner.plan(model, args, budget="min", backend="replay", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == report.baseline_predicted_dynamic_peak_bytes
