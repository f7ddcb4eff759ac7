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
