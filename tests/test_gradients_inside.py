"""Forwards that call torch.autograd.grad: they are refused, with the line and what to do."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import planner


class InnerLoop(nn.Module):
    """One step of gradient descent inside of the forward, as MAML takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = functional_call(self.net, weights, (x,)).square().mean()
        steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {k: v - 0.1 * g for (k, v), g in zip(weights.items(), steps, strict=True)}
        result: Tensor = functional_call(self.net, weights, (x,)).square().mean()
        return result


class Equation(nn.Module):
    """The residual of a differential equation, with second derivatives by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] - second[:, 0]).square().mean()


@pytest.mark.parametrize("model", [InnerLoop(), Equation()])
def test_a_forward_that_differentiates_itself_is_named_as_such(model: nn.Module) -> None:
    inputs = torch.randn(8, 4 if isinstance(model, InnerLoop) else 2)
    with pytest.raises(planner.CaptureError, match="differentiates itself"):
        planner.plan(model, args=(inputs,), budget="150%")
