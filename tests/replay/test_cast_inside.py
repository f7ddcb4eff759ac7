"""Operators that autocast has no rule for, whose kernels call others that it casts."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner._torch.compat import graphs_are_off

pytestmark = pytest.mark.any_torch


@torch.library.custom_op("planner_test_casts::mixed", mutates_args=())
def mixed(x: Tensor, weight: Tensor) -> Tensor:
    """A product, which autocast casts, in an operator that it does not know."""
    return (x @ weight).float().tanh()


@mixed.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, out = ctx.saved_tensors
    gradient = gradient * (1 - out * out)
    return gradient @ weight.t(), x.t() @ gradient


mixed.register_autograd(_backward, setup_context=_save)


_library = torch.library.Library("planner_test_casts", "FRAGMENT")
_library.define("exactly(Tensor x, Tensor weight) -> Tensor")


def _exactly(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return mixed(x, weight)


_library.impl("exactly", _exactly, "CompositeImplicitAutograd")


class Exactly(nn.Module):
    """Calls an operator that is made of the other one, with autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(64, 64) / 8), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.ops.planner_test_casts.exactly(torch.sin(self.linear(x).float()), self.weight)
        return x.square().mean()


class OfOthers(nn.Module):
    """Calls that operator, once with autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(64, 64) / 8), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for cast in (True, False, True):
            x = F.gelu(self.linear(x)).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast and torch.is_autocast_enabled("cpu")):
                x = mixed(torch.sin(x), self.weight)
        return x.square().mean()


class Warps(nn.Module):
    """Warps images by grids that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.layer = nn.Linear(3 * 16 * 16, 6), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.where(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
        x = F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)
        return F.gelu(self.layer(torch.sin(x))).square().mean()


CASES = {
    "of others": (OfOthers, (128, 64)),
    "exactly": (Exactly, (128, 64)),
    "grids": (Warps, (8, 3, 16, 16)),
}


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("name", CASES)
def test_what_they_call_is_cast_as_without_a_plan(name: str, budget: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        # Graphs are exact where autocast is off.
        backend = "replay" if name == "exactly" else "auto"
        plan = planner.plan(model, args=(x,), budget=budget, backend=backend)  # type: ignore[arg-type]
    assert plan.target.backend == "replay"
    assert bool(plan.recomputed_operations) is (budget == "min")
    plan.apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        report = planner.verify(model, (x,), repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    for autocast in (True, False):
        for one in (model, eager):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), warnings.catch_warnings():
                warnings.simplefilter("ignore", planner.PlanWarning)  # without autocast it is another path
                loss = one(x)
            loss.backward()
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True)
        )


@pytest.mark.skipif(graphs_are_off() is not None, reason="graphs are off")
def test_graphs_warn() -> None:
    model, x = OfOthers(), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(planner.PlanWarning, match="no rule for"):
        planner.plan(model, args=(x,), budget="100%", backend="graph")
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        planner.plan(model, args=(x,), budget="100%", backend="graph")
