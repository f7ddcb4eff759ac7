"""Invertible layers that let go of their input's memory in the forward, and make it again in the backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner

pytestmark = pytest.mark.heavy


class Inverted(torch.autograd.Function):
    """Runs a layer; its input's storage is emptied, and filled by the layer's inverse."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.weights = layer, weights
        with torch.no_grad():
            result: Tensor = layer.couple(x.detach())
        x.untyped_storage().resize_(0)
        ctx.held = [(x, result)]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, result = ctx.held.pop()
        with torch.no_grad():
            x.untyped_storage().resize_(x.numel() * x.element_size())
            x.set_(ctx.layer.undo(result))
        with torch.enable_grad():
            result = ctx.layer.couple(given := x.detach().requires_grad_())
        return None, *torch.autograd.grad(result, (given, *ctx.weights), gradient)


class Coupling(nn.Module):
    """An additive coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(16, 16), nn.Linear(16, 16)

    def couple(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        a = a + torch.tanh(self.f(b))
        return torch.cat([a, b + torch.tanh(self.g(a))], 1)

    def undo(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, 1)
        b = b - torch.tanh(self.g(a))
        return torch.cat([a - torch.tanh(self.f(b)), b], 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Inverted.apply(self, x, *self.parameters())  # type: ignore[no-untyped-call]
        return found


class Net(nn.Module):
    """Such layers behind plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.layers = nn.ModuleList(Coupling() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("backend", ["graph", "replay"])
def test_memory_that_a_forward_lets_go_of_is_not_counted(backend: Any) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(128, 32)
    step = planner.prepare(model, (x,), backend=backend, costs="roofline")
    for budget in ("100%", "min"):
        plan = step.plan(budget)
        report = planner.verify(model, (x,), plan=plan, repeats=0)
        assert report.ok, report.problems
        assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
        assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert "resize_" not in vars(torch.UntypedStorage)
