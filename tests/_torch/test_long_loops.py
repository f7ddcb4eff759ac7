"""Loops over many regions: one capture serves all iterations that are alike, and none that is not."""

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import assert_same, counting_runs, left_by, no_plan_warnings

SIZE = 4


class Loop(nn.Module):
    """Layers, and how they are run."""

    def __init__(self, layers: int, run: Callable[[Iterator[Any], torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(layers))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(iter(tuple(self.layers)), x).square().sum()


def one_by_one(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _two_by_two(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        following = next(layers, None)
        x = layer(x) if following is None else following(layer(x)) + x
    return x


def _more_for_each_that_is_left(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        rest = tuple(layers)
        x = layer(x) * (1 + len(rest))
        layers = iter(rest)
        if not rest:
            break
        x = next(layers)(x)
    return x


def _some_of_them(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(layers):
        x = layer(x)
        if number == 2:
            break
    for layer in layers:
        x = x + layer[0].bias
    return x


def _in_pairs(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    for first, second in zip(layers, layers, strict=False):
        x = second(x) + first(x)
    return x


def _unpacked(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    first, *others = layers
    x = first(x)
    while others:
        layer, *others = others
        x = layer(x) * len(others) + x
    return x


def _by_numbers_that_are_left(layers: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    numbers = iter(range(1, 5))
    for layer in layers:
        x = layer(x) * next(numbers, 1)
        if next(numbers, None) == 4:
            x = x * (3 + sum(numbers))
    return next(numbers, 2) * x


LOOPS = (
    one_by_one,
    _two_by_two,
    _more_for_each_that_is_left,
    _some_of_them,
    _in_pairs,
    _unpacked,
    _by_numbers_that_are_left,
)


@pytest.mark.heavy
@pytest.mark.parametrize("run", LOOPS)
def test_a_step_is_the_unplanned_one(run: Callable[[Iterator[Any], torch.Tensor], torch.Tensor]) -> None:
    for layers in (6, 7):
        model, x = Loop(layers, run), torch.randn(8, SIZE)
        planned = copy.deepcopy(model)
        planner.plan(planned, (x,), budget="min", regions="auto").apply(planned)
        step = partial(_step, x=x)
        with counting_runs() as runs, no_plan_warnings():
            ours = left_by(planned, step)
        assert runs.backward
        assert_same(left_by(model, step), ours)


def _step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    loss.backward()
    return loss


@pytest.mark.heavy
def test_captures_of_a_step_do_not_grow_with_its_layers() -> None:
    captured = []
    for layers in (6, 24):
        model, x = Loop(layers, one_by_one), torch.randn(8, SIZE)
        planner.plan(model, (x,), budget="min", regions="auto").apply(model)
        torch._dynamo.utils.counters.clear()
        _step(model, x)
        captured.append(torch._dynamo.utils.counters["frames"]["total"])
    assert captured[0] == captured[1] > 0


class Chunked(nn.Module):
    """Asks for the signature of a method of each layer, as Hugging Face's chunked feed-forwards do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(SIZE, SIZE, SIZE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            count = len(inspect.signature(layer.forward).parameters)
            x = x + layer(*[x] * count).tanh()
            torch._dynamo.graph_break()
        return x.square().sum()


def test_a_loop_that_asks_for_signatures_is_replayed() -> None:
    """Dynamo looks up what a loop still comes to without its own names, and ends in a NameError."""
    model, x = Chunked(), torch.randn(8, SIZE)
    plan = planner.plan(model, x, budget="min", solver="sqrt_n")
    assert plan.coverage == "replayed"
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems
