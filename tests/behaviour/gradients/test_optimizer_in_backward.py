"""Hooks that step an optimizer in the backward: planning and verifying put back all that these change."""

import copy
import functools
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanWarning
from planner.hooks.arrival_order import ArrivalOrder

pytestmark = pytest.mark.heavy

LAYERS = ["0", "2", "4", "6"]
OPTIMIZERS: dict[torch.Tensor, torch.optim.Optimizer] = {}
STEPS = 0


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())])


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _adam(parameter: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter], lr=0.1, foreach=False)


def _sgd(parameter: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


def _step_by_global(parameter: torch.Tensor) -> None:
    global STEPS
    STEPS += 1
    OPTIMIZERS[parameter].step()
    OPTIMIZERS[parameter].zero_grad()


class _Trainer:
    """What such hooks are methods of."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = {p: _adam(p) for p in model.parameters()}
        self.schedulers = {p: torch.optim.lr_scheduler.StepLR(o, 1) for p, o in self.optimizers.items()}
        self.steps = 0
        self.seen = Counter[str]()
        self.norms = np.zeros(4)
        self.averages = {p: p.detach().clone() for p in model.parameters()}
        self.history: list[float] = []

    def step(self, parameter: torch.Tensor) -> None:
        self.steps += 1
        self.seen["steps"] += 1
        self.norms += 1.0
        self.history.append(1.0)
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()
        self.schedulers[parameter].step()
        with torch.no_grad():
            self.averages[parameter].lerp_(parameter, 0.5)

    def state(self) -> Any:
        states = [o.state_dict() for o in self.optimizers.values()]
        return (
            _states([*self.optimizers.values()]),
            [s["param_groups"] for s in states],
            [s.state_dict() for s in self.schedulers.values()],
            (self.steps, dict(self.seen), self.norms.tolist(), self.history),
            [t.tolist() for t in self.averages.values()],
        )


def _by_dictionary(model: nn.Module, make: Callable[[torch.Tensor], torch.optim.Optimizer]) -> list[Any]:
    optimizers = {p: make(p) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def _by_variable(model: nn.Module, make: Callable[[torch.Tensor], torch.optim.Optimizer]) -> list[Any]:
    optimizers = [make(p) for p in model.parameters()]

    def step(optimizer: torch.optim.Optimizer, _parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(functools.partial(step, optimizer))
    return optimizers


def _by_global(model: nn.Module, make: Callable[[torch.Tensor], torch.optim.Optimizer]) -> list[Any]:
    OPTIMIZERS.clear()
    OPTIMIZERS.update({p: make(p) for p in model.parameters()})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_step_by_global)
    return list(OPTIMIZERS.values())


def _as_lomo(model: nn.Module, _make: object) -> list[Any]:
    """Steps what has a gradient when the next one arrives."""

    def update(gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)
                    parameter.grad = None
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(update)
    return []


def _states(optimizers: list[Any]) -> Any:
    return [
        [
            {n: t.tolist() if isinstance(t, torch.Tensor) else t for n, t in s.items()}
            for s in o.state.values()
        ]
        for o in optimizers
    ]


CASES = [
    pytest.param((_by_dictionary, _adam, None), marks=pytest.mark.heavy),
    (_by_dictionary, _adam, LAYERS),
    pytest.param((_by_variable, _sgd, None), marks=pytest.mark.heavy),
    pytest.param((_by_global, _sgd, LAYERS), marks=pytest.mark.heavy),
    pytest.param((_as_lomo, None, LAYERS), marks=pytest.mark.heavy),
]


@pytest.mark.graphs
@pytest.mark.filterwarnings("ignore:hooks let go of the gradients:planner.PlanWarning")
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_stepped_and_the_peak_is_the_measured_one(case: Any) -> None:
    put_on, make, regions = case
    global STEPS
    STEPS = 0
    model, x = _model(), torch.randn(8, 64)
    optimizers = put_on(model, make)
    for _ in range(2):  # the state is there, and is not what it was at first
        _loss(model(x)).backward()
    model.zero_grad()
    weights, states, steps = copy.deepcopy(model.state_dict()), _states(optimizers), STEPS
    plan = planner.plan(model, (x,), loss=_loss, budget="1GiB", solver="none", regions=regions)
    report = planner.verify(model, (x,), plan=plan, loss=_loss, repeats=1)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
    of_weights = sum(p.numel() * 4 for p in model.parameters())
    if regions:  # gradients are gone when others are made
        assert report.measured_dynamic_peak_bytes < of_weights
    held = sum(t.numel() * 4 for o in optimizers for s in o.state.values() for t in s.values())
    assert plan.resident.optimizer_bytes == held
    assert _states(optimizers) == states
    assert steps == STEPS
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:hooks let go of the gradients:planner.PlanWarning")
def test_all_that_a_method_changes_is_put_back() -> None:
    model, x = _model(), torch.randn(8, 64)
    trainer = _Trainer(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(trainer.step)
    before, weights = json.dumps(trainer.state()), copy.deepcopy(model.state_dict())
    plan = planner.plan(model, (x,), loss=_loss, budget="1GiB", solver="none")
    assert json.dumps(trainer.state()) == before
    report = planner.verify(model, (x,), plan=plan, loss=_loss, repeats=0)
    assert report.ok, report.problems
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
    assert json.dumps(trainer.state()) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_hook_of_which_something_cannot_be_put_back_is_not_run_and_said() -> None:
    """A generator that was asked for a number cannot be set back."""
    model, x = _model(), torch.randn(8, 64)
    numbers, optimizers = (n for n in range(1000)), {p: _sgd(p) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        next(numbers)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planner.plan(model, (x,), loss=_loss, budget="100%", solver="none")
    [note] = [note for note in plan.notes if "count until the step ends" in note]
    assert "numbers" in note
    with pytest.warns(
        PlanWarning, match="verify does not run the hooks after accumulation on 0.weight"
    ) as said:
        report = planner.verify(model, (x,), plan=plan, loss=_loss, repeats=0)
    assert len(said) == 1
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert next(numbers) == 0
    assert not any(o.state for o in optimizers.values())
    plan.apply(model)
    _loss(model(x)).backward()  # training runs it
    assert next(numbers) == 9
    assert all(o.state for o in optimizers.values())


def test_verify_sees_weights_that_a_wrong_gradient_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no gradients that could be compared."""
    model, x = _model(), torch.randn(8, 64)
    _by_dictionary(model, _sgd)
    plan = planner.plan(model, (x,), loss=_loss, budget="1GiB", solver="none", regions=LAYERS)

    def twice_the_gradient(_hook: ArrivalOrder, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a + (a - a.detach()) if a.shape == (64, 64) else a for a in args)

    monkeypatch.setattr(ArrivalOrder, "arguments", twice_the_gradient)
    report = planner.verify(model, (x,), plan=plan, loss=_loss, repeats=0)
    assert report.loss_equal
    assert not report.gradients_equal
    assert report.problems[0].startswith("parameter 0.weight differs: 4,096 of 4,096 elements")


@pytest.mark.graphs
def test_where_gradients_are_let_go_of_without_regions_it_is_said() -> None:
    model, x = _model(), torch.randn(8, 64)
    _by_dictionary(model, _sgd)
    with pytest.warns(PlanWarning, match="let go of the gradients of 8 parameters .* regions='auto'"):
        planner.plan(model, (x,), loss=_loss, budget="1GiB", solver="none")


class _StepsItself(nn.Module):
    """A hook on a result, made in each forward, steps an optimizer among the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.optimizer = _sgd(self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if hidden.requires_grad:
            hidden.register_hook(self._step)
        return self.second(hidden)

    def _step(self, _gradient: torch.Tensor) -> None:
        self.optimizer.step()


def _by_its_own(_layer: nn.Module) -> nn.Module:
    return _StepsItself()


def _by_hook_on_a_layer(layer: nn.Module) -> nn.Module:
    optimizers = {layer: _sgd(layer.weight)}  # type: ignore[arg-type]
    layer.register_full_backward_hook(lambda which, _given, _got: optimizers[which].step())
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(64, 64))
    model.optimizer = optimizers[layer]  # type: ignore[assignment]
    return model


def _by_hook_on_a_layer_by_global(layer: nn.Module) -> nn.Module:
    OPTIMIZERS.clear()
    OPTIMIZERS[layer.weight] = _sgd(layer.weight)  # type: ignore[arg-type,index]
    layer.register_full_backward_pre_hook(lambda which, _got: OPTIMIZERS[which.weight].step())  # type: ignore[index]
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(64, 64))


@pytest.mark.parametrize("build", [_by_its_own, _by_hook_on_a_layer, _by_hook_on_a_layer_by_global])
def test_optimizers_of_other_hooks_are_put_back(build: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = build(nn.Linear(64, 64)), torch.randn(8, 64)
    found = [getattr(model, "optimizer", None), *OPTIMIZERS.values()]
    [optimizer] = [o for o in found if o is not None][:1]
    for _ in range(3):  # gradients are there, which a step in the backward finds
        _loss(model(x)).backward()
    weights, states = copy.deepcopy(model.state_dict()), _states([optimizer])
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        plan = planner.plan(model, (x,), loss=_loss, budget="1GiB", solver="none")
        assert _states([optimizer]) == states
        planner.verify(model, (x,), plan=plan, loss=_loss, repeats=0)
    assert _states([optimizer]) == states
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
