"""Sums of residuals in the forward are written into what they are added to, and cost a plan nothing."""

import copy

import pytest
import torch
import torch.nn as nn

import planner

pytestmark = pytest.mark.heavy


class Residual(nn.Module):
    """Blocks of convolutions as in ResNet, the first with a convolution beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.block(3)
        self.beside = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.ModuleList(self.block(8) for _ in range(4))

    @staticmethod
    def block(channels: int) -> nn.Sequential:
        inner = (nn.Conv2d(channels, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(*inner, nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, beside = self.first(x), self.beside(x)
        x = (first + beside).relu()
        for block in self.blocks:
            residual, x = x, block(x)
            x += residual
            x = x.relu()
        return x.square().mean()


@pytest.mark.parametrize("budget", ["1TiB", "min"])
def test_residuals_are_added_in_place(budget: str) -> None:
    """Five sums, each in the memory of the result of a batch normalisation; with recomputation as well."""
    torch.manual_seed(0)
    model, x = Residual().train(), torch.randn(4, 3, 12, 12)
    plan = planner.plan(model, (x,), budget=budget, solver="none" if budget == "1TiB" else "auto")
    record = plan.graphs[0]
    sums = [op for op in record.ops if op.name == "aten.add.Tensor" and op.phase == "forward"]
    assert len([op for op in sums if op.bytes == 0]) == 5
    normalised = {i for i in record.recomputed if "batch_norm" in record.ops[i].name}
    assert (budget == "min") == bool(normalised)
    report = planner.verify(copy.deepcopy(model), (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
