"""Gradients that are looked at as they leave a planned graph, once the sizes of the inputs vary."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import assert_same, layers, left_by, no_plan_warnings, plan_of


class Alike(nn.Module):
    """Weights of one shape: a gradient in the place of another one is not found out by its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_a_gradient_penalty() -> None:
    model, (x,), _ = layers(Alike)
    twin = copy.deepcopy(model)
    plan_of(model, (x,)).apply(model)

    def loop(network: Any) -> list[torch.Tensor]:
        left = []
        for size in (64, 40, 24):
            batch = x[:size].clone().requires_grad_()
            (slope,) = torch.autograd.grad(network(batch), batch, create_graph=True)
            slope.square().sum().backward()
            left.append(slope.detach())
        return left

    assert_same(left_by(model, loop), left_by(twin, loop))


def test_two_calls_in_a_region_of_autocast() -> None:
    model, (x,), _ = layers(Alike)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = planner.plan(model, (x,), budget="100%", solver="sqrt_n")
    plan.apply(model)

    def loop(network: Any) -> list[torch.Tensor]:
        left = []
        for size in (64, 40, 24):
            network.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = network(x[:size]) * network(x[:size] + 1)
            loss.backward()
            left += [loss.detach(), *(p.grad for p in network.parameters())]
        return left

    with no_plan_warnings():
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))
