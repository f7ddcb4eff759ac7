"""Autograd functions of users (``torch.autograd.Function``): what they keep, and where they stand."""

from typing import Any

import pytest
import torch

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
