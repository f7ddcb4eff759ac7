"""Gradients that a forward takes inside, under autocast: in which order eager adds up, in which type."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad

import planner
from planner._torch.layouts.shape_functions import layouts_of_kernels

aten = torch.ops.aten


class Half(nn.Module):
    """Everything in half precision, in one region of autocast."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Critic(Half):
    """Each weight is used for three batches, of which one is differentiated twice."""

    def loss(self, x: Tensor) -> Tensor:
        between = (0.5 * x).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(2, 1) - 1).square().mean()
        return self.net(x).mean() - self.net(-x).mean() + penalty  # type: ignore[no-any-return]


class Transformed(Half):
    """Each weight is used inside of a transform, where no cast of it is kept, and outside."""

    def loss(self, x: Tensor) -> Tensor:
        slope = grad(lambda x: self.net(x).sum())(x)
        return slope.square().mean() + self.net(x).mean()  # type: ignore[no-any-return]


def _smooth() -> Half:
    return Critic(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 3))


def _normalised() -> Half:
    return Critic(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3))


def _transformed() -> Half:
    return Transformed(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3))


@pytest.mark.heavy
@pytest.mark.parametrize("build", [_smooth, _normalised, _transformed])
def test_gradients_inside_under_autocast_are_eagers(build: Callable[[], Half]) -> None:
    torch.manual_seed(0)
    model, args = build(), (torch.randn(4, 3, 8, 8),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n", costs="roofline")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.parametrize(
    "normalise",
    [
        lambda x, w: aten.native_group_norm(x, w, w, 2, 4, 9, 2, 1e-5),
        lambda x, w: aten.native_layer_norm(x.transpose(1, 3).contiguous(), [4], w, w, 1e-5),
        lambda x, w: aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
        lambda x, w: aten.native_group_norm_backward(
            x, x, *(torch.ones(2, 2, dtype=w.dtype) for _ in "ab"), w, 2, 4, 9, 2, [True] * 3
        ),
    ],
)
def test_statistics_of_half_precision_have_the_type_of_the_kernels(
    normalise: Callable[[Tensor, Tensor], list[Tensor]],
) -> None:
    x, w = torch.randn(2, 4, 3, 3, dtype=torch.bfloat16), torch.ones(4)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with layouts_of_kernels(), mode:
        found = [t.dtype for t in normalise(mode.from_tensor(x), mode.from_tensor(w))]
    assert found == [t.dtype for t in normalise(x, w)]
