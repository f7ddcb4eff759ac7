"""Gradients from outside that are added to sums of the graphs, unseen by the plan, give a warning."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.autograd.graph import get_gradient_edge

import planner
from planner.hooks import external_accumulation_check
from tests.side_by_side import no_plan_warnings

pytestmark = pytest.mark.heavy


class Tied(nn.Module):
    """Words in and out share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(torch.tanh(self.words(x)))))


class Twice(nn.Module):
    """Uses its input several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * torch.sigmoid(self.second(x))


def _words() -> torch.Tensor:
    return torch.randint(64, (8, 24))


def _planned(model: nn.Module, *args: torch.Tensor) -> nn.Module:
    planner.plan(model, args, budget="min", solver="sqrt_n").apply(model)
    return model


def _tied() -> nn.Module:
    torch.manual_seed(0)
    return _planned(Tied().train(), _words())


def _regularised(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(_words()).square().mean()
    return loss + 0.01 * sum(p.square().sum() for p in model.parameters())


def _called_twice(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(_words()).square().mean() + model(_words()).exp().mean()
    return loss


def _backward(loss: torch.Tensor, _model: nn.Module) -> None:
    loss.backward()


def _gradients(loss: torch.Tensor, model: nn.Module) -> None:
    torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("differentiate", [_backward, _gradients])
@pytest.mark.parametrize("loss", [_regularised, _called_twice])
def test_a_weight_that_is_used_elsewhere_too_is_warned_of_once(
    loss: Callable[[nn.Module], Any], differentiate: Callable[[torch.Tensor, nn.Module], None]
) -> None:
    model = _tied()
    with pytest.warns(planner.PlanWarning, match=r"\(64, 32\).* from outside"):
        differentiate(loss(model), model)
    with no_plan_warnings():
        differentiate(loss(model), model)
    assert not any(p._backward_hooks for p in model.parameters())


def test_an_input_that_is_used_elsewhere_too_is_warned_of() -> None:
    torch.manual_seed(0)
    before, model = nn.Linear(32, 32), _planned(Twice().train(), torch.randn(16, 32, requires_grad=True))
    with no_plan_warnings():
        model(before(torch.randn(16, 32))).sum().backward()
    x = before(torch.randn(16, 32))
    loss = (model(x) + x).sum()
    with pytest.warns(planner.PlanWarning, match=r"\(16, 32\).* from outside"):
        loss.backward()


@pytest.mark.parametrize("leaf", [True, False])
def test_an_input_whose_gradient_is_asked_for_is_warned_of(leaf: bool) -> None:
    torch.manual_seed(0)
    model = _planned(Twice().train(), torch.randn(16, 32, requires_grad=True))
    x = torch.randn(16, 32, requires_grad=True)
    x = x if leaf else x * 2
    with no_plan_warnings():
        torch.autograd.grad(model(x).sum(), x)
    with pytest.warns(planner.PlanWarning, match=r"\(16, 32\).* from outside"):
        torch.autograd.grad((model(x) + x).sum(), x)


def _as_planned(model: nn.Module) -> None:
    model(_words()).square().mean().backward()


def _accumulated(model: nn.Module) -> None:
    for _ in range(3):
        model(_words()).square().mean().backward()


def _kept(model: nn.Module) -> None:
    loss = model(_words()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _without_backward(model: nn.Module) -> None:
    model(_words())
    model(_words()).square().mean().backward()


def _asked_for(model: nn.Module) -> None:
    torch.autograd.grad(model(_words()).square().mean(), list(model.parameters()))
    model(_words()).square().mean().backward()


def _halved(model: nn.Module) -> None:
    handle = next(model.parameters()).register_hook(lambda gradient: gradient / 2)
    model(_words()).square().mean().backward()
    handle.remove()


@pytest.mark.parametrize("loop", [_as_planned, _accumulated, _kept, _without_backward, _asked_for, _halved])
def test_nothing_is_warned_of_without_reason(loop: Callable[[nn.Module], None]) -> None:
    model = _tied()
    twin = planner.remove(copy.deepcopy(model))
    with no_plan_warnings():
        for each in (model, twin):
            torch.manual_seed(1)
            loop(each)
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.equal(found.grad, expected.grad)


class Layers(nn.Module):
    """Layers of which each is a graph, all by the same code, that uses its input and its weight twice."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sigmoid(x) * torch.tanh(self.mix(torch.tanh(self.mix(x))))
            torch._dynamo.graph_break()
            return x

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branches(nn.Module):
    """Two results of which each is used, several times, by the same code in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.first(x), self.second(x)
        return (first * second).mean() + self.spread(first) + self.spread(second)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x) * torch.tanh(x)
        torch._dynamo.graph_break()
        return x.square().mean()


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return _planned(Layers(3).train(), torch.randn(16, 32, requires_grad=True))


def _branches() -> nn.Module:
    torch.manual_seed(0)
    return _planned(Branches().train(), torch.randn(16, 32))


@pytest.mark.graphs
@pytest.mark.parametrize("build", [_layers, _branches])
def test_the_same_code_is_looked_at_each_time_it_runs(build: Callable[[], nn.Module]) -> None:
    model = build()
    with no_plan_warnings():
        for _ in range(2):
            model(torch.randn(16, 32)).square().mean().backward()
            model.zero_grad()


@pytest.mark.graphs
@pytest.mark.parametrize("differentiate", [_backward, _gradients])
@pytest.mark.parametrize("layer", range(3))
def test_one_of_several_layers_is_warned_of(
    layer: int, differentiate: Callable[[torch.Tensor, nn.Module], None]
) -> None:
    model = _layers()
    x = torch.randn(16, 32, requires_grad=True)
    weight = model.get_submodule(f"layers.{layer}.mix").weight
    loss = model(x).square().mean() + 0.01 * weight.square().sum()
    with pytest.warns(planner.PlanWarning, match=r"\(32, 32\).* from outside"):
        differentiate(loss, model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this backward fails")


def test_a_backward_that_fails_leaves_no_hook() -> None:
    torch.manual_seed(0)
    model = _planned(Twice().train(), torch.randn(16, 32, requires_grad=True))
    x = torch.randn(16, 32, requires_grad=True)
    through = _Fails.apply(x)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="this backward fails"):
        torch.autograd.grad(model(through).sum(), [through, x])
    assert not through._backward_hooks
    with pytest.warns(planner.PlanWarning, match=r"\(16, 32\).* from outside"):
        torch.autograd.grad((model(through) + through).sum(), through)


def test_hooks_go_with_the_forward_that_made_them() -> None:
    """Of a forward without a backward too, where a weight's node outlives it."""
    model = _tied()
    node = get_gradient_edge(model.get_parameter("words.weight")).node
    handle = node.register_prehook(lambda _gradients: None)
    hooks = handle.hooks_dict_ref()
    output = model(_words())
    assert len(hooks) == 2
    del output
    assert len(hooks) == 1
    with no_plan_warnings():
        model(_words()).square().mean().backward()
    assert len(hooks) == 1
    handle.remove()


def test_looking_holds_nothing_that_is_passed_between_graphs() -> None:
    torch.manual_seed(0)
    model, x = Layers(3).train(), torch.randn(512, 32)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", costs="roofline")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_looking_costs_no_memory_and_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    watch = external_accumulation_check.ExternalAccumulationCheck._watch

    def counted(self: Any, run: object, position: int, tensor: torch.Tensor) -> Any:
        looked.append(position)
        return watch(self, run, position, tensor)

    monkeypatch.setattr(external_accumulation_check.ExternalAccumulationCheck, "_watch", counted)
    torch.manual_seed(0)
    model, x = Tied().train(), _words()
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert looked
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())
