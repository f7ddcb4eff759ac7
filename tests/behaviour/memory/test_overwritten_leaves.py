"""Weights that a forward overwrites under ``torch.no_grad()``: no gradient arrives at what it writes."""

import pytest
import torch
from torch import Tensor, nn

import planner
from tests.side_by_side import Layers, assert_trains_alike, layers, no_plan_warnings, plan_of, steps

pytestmark = pytest.mark.heavy


class Clipped(Layers):
    """Clips a weight before it uses it, as critics do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers:
                layer[0].weight.clamp_(-0.1, 0.1)
        return self.run(x).square().mean()


class Normalised(Layers):
    """Gives a weight length one, on the way from one graph to another."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.last.weight.copy_(nn.functional.normalize(self.last.weight, dim=1))
        return self.last(x).square().mean()


class Filled(Layers):
    """Writes to what is no leaf, and to an empty tensor: gradients do go through these."""

    def forward(self, x: Tensor) -> Tensor:
        x, filled = self.run(x), torch.zeros(64, 32)
        torch._dynamo.graph_break()
        x.mul_(self.layers[0][0].weight.mean())
        filled[:32] = self.layers[0](x[:32])
        torch._dynamo.graph_break()
        return (x + filled).square().mean()


@pytest.mark.parametrize("build", [Clipped, Normalised])
def test_the_peak_counts_no_gradient_of_what_is_written(build: type[Layers]) -> None:
    model, args, _ = layers(build)
    plan = plan_of(model, args)
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.graphs
@pytest.mark.parametrize("build", [Clipped, Normalised, Filled])
def test_gradients_are_those_of_the_unplanned_model(build: type[Layers]) -> None:
    model, args, _ = layers(build)
    with no_plan_warnings():
        assert_trains_alike(model, args, steps(args), expected_runs=None)
