"""Autograd functions of users (``torch.autograd.Function``): what they keep, and where they stand."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import Layers, layers


class Exponential(torch.autograd.Function):
    """Keeps its result as an attribute of ``ctx``, which PyTorch frees with the node only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x.exp()
        return ctx.kept.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.kept  # type: ignore[no-any-return]


class Kept(Layers):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + Exponential.apply(0.1 * layer(x))
        return x


def test_what_ctx_keeps_is_freed_at_its_last_use() -> None:
    model, args, _ = layers(Kept)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class EndsInOne(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Exponential.apply(0.1 * self.run(x))
        return y


@pytest.mark.heavy
def test_the_last_operation_of_a_model_is_one() -> None:
    model, args, _ = layers(EndsInOne)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n", loss=torch.sum)
    assert plan.recomputed_operations
    report = planner.verify(model, args, plan=plan, loss=torch.sum, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class StraightThrough(torch.autograd.Function):
    """Takes no gradient for one of zeros, as functions do unless they say otherwise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone()


class FirstAlone(torch.autograd.Function):
    """Returns no gradient for its second argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.clone(), None


class Rounded(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken, self.first, self.second = broken, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.first(x).tanh(), StraightThrough.apply(self.second(x))
        if self.broken:
            torch._dynamo.graph_break()
        return FirstAlone.apply(first, second).square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("broken", [False, True])
def test_gradients_of_zeros_that_a_function_makes_of_none_are_missed_aloud(broken: bool) -> None:
    torch.manual_seed(0)
    model, x = Rounded(broken).train(), torch.randn(16, 8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", planner.PlanWarning)
        plan = planner.plan(model, x, budget="100%", solver="sqrt_n")
    report = planner.verify(model, x, plan=plan, repeats=0)
    said = [str(w.message) for w in told if "None with it, the first is second.weight" in str(w.message)]
    assert bool(said) is broken
    assert report.gradients_equal is not broken
