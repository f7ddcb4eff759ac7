"""Hooks that are registered, exchanged or taken away between planned steps count, as without a plan."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_forward_hook

import planner
from planner.verification.measure import measure_peak
from tests.side_by_side import assert_same, layers, left_by, plan_of

Register = Callable[[nn.Module], Any]


def _forward(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda _module, _args, output: output * 1.5)


def _forward_pre(layer: nn.Module) -> Any:
    return layer.register_forward_pre_hook(lambda _module, args: (args[0] + 0.1,))


def _backward(layer: nn.Module) -> Any:
    return layer.register_full_backward_hook(lambda _module, gradients, _: (gradients[0] * 2,))


def _on_all(_layer: nn.Module) -> Any:
    return register_module_forward_hook(
        lambda module, _args, output: output * 1.5 if isinstance(module, nn.GELU) else None
    )


@pytest.mark.parametrize(
    "register",
    [_forward, _on_all, *(pytest.param(kind, marks=pytest.mark.heavy) for kind in (_forward_pre, _backward))],
)
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_a_hook_that_comes_between_steps_and_goes_again(register: Register) -> None:
    model, (x,), _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, (x,)).apply(model)

    def loop(network: Any) -> list[torch.Tensor]:
        losses = []

        def step() -> None:
            loss = network(x)
            loss.backward()
            losses.append(loss.detach())

        step()
        handle = register(network.layers[1])
        try:
            step()
        finally:
            handle.remove()
        step()
        return losses

    assert_same(left_by(model, loop), left_by(twin, loop))


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:the forward took a path:planner.PlanWarning")
def test_a_hook_that_ends_graphs_and_goes_again_leaves_the_plan_as_it_was() -> None:
    def log(module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        module.seen = output.detach().mean().item()

    model, args, _ = layers()
    plan = plan_of(model, args)
    plan.apply(model)
    model(*args).backward()
    for _ in range(2):
        handle = model.layers[0][0].register_forward_hook(log)
        for _ in range(2):
            model(*args).backward()
        handle.remove()
        model(*args).backward()
        model.zero_grad()
        peak = measure_peak(lambda: model(*args).backward(), "cpu").peak_bytes
        assert peak <= plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_a_hook_that_takes_the_place_of_another() -> None:
    model, (x,), _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, (x,)).apply(model)

    def loop(network: Any) -> list[torch.Tensor]:
        losses = []
        for factor in (1.5, 2.5):
            handle = network.layers[1].register_forward_hook(lambda _m, _a, output, f=factor: output * f)
            loss = network(x)
            loss.backward()
            handle.remove()
            losses.append(loss.detach())
        return losses

    assert_same(left_by(model, loop), left_by(twin, loop))


@pytest.mark.heavy
def test_hooks_on_all_modules_that_come_later_are_warned_of() -> None:
    model, (x,), _ = layers()
    plan_of(model, (x,)).apply(model)
    model(x).backward()
    handle = _on_all(model)
    try:
        with pytest.warns(planner.PlanWarning, match="on all modules at once"):
            model(x)
    finally:
        handle.remove()
