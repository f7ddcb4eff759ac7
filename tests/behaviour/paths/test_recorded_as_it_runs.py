"""What a recorded step takes where PyTorch runs otherwise without data, or under a dispatch mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import planner

pytestmark = pytest.mark.any_torch


class Reduced(nn.Module):
    """What a layer returns, reduced to one number."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.reduce = nn.Linear(8, 8), reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.layer(x))


@pytest.mark.parametrize("reduce", [Tensor.max, Tensor.min, Tensor.median])
def test_gradients_of_extremes_fill_zeros(reduce: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Reduced(reduce), torch.randn(400, 8)
    plan = planner.plan(model, (x,), budget="min", backend="replay", costs="roofline")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class Scaled(nn.Module):
    """Takes most in the forward, where it multiplies by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        with torch.no_grad():
            scale = (y.repeat(8, 1) * 0.5).mean()
        return (y * scale).square().mean()


@pytest.mark.parametrize("budget", ["min", "95%", "100%"])
def test_numbers_are_tensors_twice_under_a_mode(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(256, 32)
    plan = planner.plan(model, (x,), budget=budget, backend="replay", costs="roofline")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class Compressed(nn.Module):
    """A product with a matrix of compressed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(16).to_sparse_csr(), self.layer(x), "sum").square().mean()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_compressed_tensors_take_is_told_of() -> None:
    model, x = Compressed(), torch.randn(16, 8)
    with pytest.warns(planner.PlanWarning, match="computes with sparse tensors"):
        planner.plan(model, (x,), budget="100%", backend="replay", costs="roofline")
