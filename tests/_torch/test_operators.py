"""Functions and operators of the user's inside a planned module."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.user_plan import Plan
from tests.side_by_side import Layers, assert_same, assert_trains_alike, layers, left_by, plan_of, steps


def _trains(build: Callable[[], nn.Module]) -> tuple[nn.Module, Plan]:
    model, args, _ = layers(build)
    return model, assert_trains_alike(model, args, steps(args), expected_runs=2)


class StraightThrough(torch.autograd.Function):
    """Rounds forward, and lets half the gradient pass where the input was not negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x >= 0) / 2


@pytest.mark.heavy
def test_a_custom_autograd_function() -> None:
    class Rounded(Layers):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + StraightThrough.apply(layer(x))
            return x

    _trains(Rounded)


class Breaking(torch.autograd.Function):
    """Of which Dynamo captures the inside alone, where gradients are off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return StraightThrough.forward(ctx, x)

    backward = StraightThrough.backward


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_custom_autograd_function_that_breaks_the_graph() -> None:
    model, args, _ = layers(_with(Breaking.apply))
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert len(plan.forward_only) == 1  # what is inside has no backward
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert_trains_alike(model, args, steps(args), expected_runs=None)


@torch.library.custom_op("planner_tests::scaled_tanh", mutates_args=())
def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.from_numpy(np.tanh(x.detach().numpy() * scale))


@scaled_tanh.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _scaled_tanh_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return gradient * (1 - output * output) * ctx.scale, None


scaled_tanh.register_autograd(_scaled_tanh_backward, setup_context=_save)


@torch.library.custom_op("planner_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Registered without a shape function."""
    return 2 * x


doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


@torch.library.custom_op("planner_tests::rank", mutates_args=())
def rank(x: torch.Tensor) -> torch.Tensor:
    """Registered without a gradient."""
    return x.argsort(-1).argsort(-1).to(x.dtype)


@rank.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _with(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    class WithFunction(Layers):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + function(layer(x))
            return x

    return WithFunction


@torch.library.custom_op("planner_tests::blurred", mutates_args=())
def blurred(x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers and does not say so."""
    return x * (torch.rand_like(x) < 0.7)


@blurred.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save_blurred(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _blurred_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (output,) = ctx.saved_tensors
    return gradient * (output != 0)


blurred.register_autograd(_blurred_backward, setup_context=_save_blurred)


@torch.library.custom_op("planner_tests::counted", mutates_args=("calls",))
def counted(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    """Counts its runs in one of its arguments, and computes with the count."""
    calls += 1
    return x.tanh() / calls


@counted.register_fake
def _(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _recomputed(plan: Plan) -> set[str]:
    return {graph.ops[i].name for graph in plan.graphs for i in graph.recomputed}


@pytest.mark.heavy
def test_an_operator_of_the_users() -> None:
    _, plan = _trains(_with(lambda x: scaled_tanh(x, 0.5)))
    assert "planner_tests.scaled_tanh.default" in _recomputed(plan)
    assert any("could not be measured" in note for note in plan.notes)


@pytest.mark.heavy
def test_an_operator_that_draws_numbers_draws_the_same_again() -> None:
    _, plan = _trains(_with(lambda x: blurred(x).square()))
    assert "planner_tests.blurred.default" in _recomputed(plan)


@pytest.mark.heavy
def test_an_operator_that_changes_an_argument_runs_once() -> None:
    class Counting(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) * counted(x.detach(), self.calls)
            return x

    model, _ = _trains(Counting)
    assert model.calls == 8  # of two steps


@pytest.mark.heavy
def test_an_operator_without_a_gradient() -> None:
    _trains(_with(lambda x: x * rank(x.detach())))


def test_an_operator_without_a_shape_function_is_replayed_and_named_where_graphs_are_asked_for() -> None:
    model, args, _ = layers(_with(doubled))
    plan = planner.plan(model, args, budget="min", costs="roofline")
    assert plan.target.backend == "replay"
    assert any(re.search(r"doubled.*no fake impl", note) for note in plan.notes)
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    with pytest.raises(planner.CaptureError, match=r"doubled.*no fake impl"):
        planner.plan(model, args, budget="min", costs="roofline", backend="graph")


@pytest.mark.heavy
def test_dropout_of_nothing_copies_nothing_and_of_everything_draws_no_numbers() -> None:
    def none_and_all(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.0) + F.dropout(x.sin(), 1.0)

    _, plan = _trains(_with(none_and_all))
    names = [op.name for op in plan.graphs[0].ops]
    assert "aten.clone.default" not in names
    assert names.count("planner.draw_mask.default") == 4  # of the layers themselves


class OneImage(nn.Module):
    """Residual blocks of images, then of tokens: the gradients of a single image come back transposed.

    Args:
        pooled_last: Whether the first two gradients that are added up both have the channels last.
    """

    def __init__(self, pooled_last: bool) -> None:
        super().__init__()
        self.pooled_last = pooled_last
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(48, 48, 1), nn.BatchNorm2d(48), nn.GELU(), nn.Conv2d(48, 48, 1))
            for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(48) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            if self.pooled_last:
                x = x + norm(block(x))
            x = x + (F.avg_pool2d(x, 3, 1, 1) - x) / 4
            if not self.pooled_last:
                x = x + norm(block(x))
        x = x.flatten(2).transpose(1, 2)
        x = x + torch.tanh(self.head(self.norm(x)))
        return x.mean(dim=1).exp().sum()


@pytest.mark.heavy
@pytest.mark.parametrize("pooled_last", [False, True])
def test_gradients_of_a_single_image_lie_in_memory_as_without_a_plan(pooled_last: bool) -> None:
    torch.manual_seed(0)
    model, x = OneImage(pooled_last).train(), torch.randn(1, 48, 7, 7)
    report = planner.verify(model, (x,), plan=plan_of(model, (x,)), repeats=0)
    assert report.ok, report.problems


class Pooled(nn.Module):
    """A weighted mean of tokens: products with a matrix of one row, whose steps say which kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weigh, self.last = nn.Linear(48, 48), nn.Linear(48, 1), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        weights = self.weigh(x).squeeze(-1).softmax(1)
        return self.last(torch.einsum("bn,bnd->bd", weights, x)).square().mean()


def test_products_with_one_row_run_as_without_a_plan() -> None:
    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(4, 64, 48)
    twin = copy.deepcopy(model)
    plan_of(model, (x,)).apply(model)
    assert_same(left_by(model, steps((x,))), left_by(twin, steps((x,))))
