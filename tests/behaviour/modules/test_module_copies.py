"""Modules that hold what cannot be copied are planned; a copy shares it."""

import copy
import functools
import queue
import sys
import threading
import types
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.nn as nn
import torch.nn.functional as functional

import planner
from planner.module_copies import copied_module, referring_to


class Holding(nn.Module):
    """Holds an object, two levels down."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 8)])
        self.layers[0].held = {"inside": [held]}

    @property
    def held(self) -> Any:
        return self.layers[0].held["inside"][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        return second(functional.relu(first(x))).square().mean()  # type: ignore[no-any-return]


class Worker(threading.Thread):
    """A class of the user's own."""


SHARED = {
    "lock": threading.Lock,
    "reentrant lock": threading.RLock,
    "file of Python": lambda: functional,
    "thread": Worker,
    "queue": queue.Queue,
    "simple queue": queue.SimpleQueue,
    "executor": lambda: ThreadPoolExecutor(1),
    "output": lambda: sys.__stdout__,
    "keys": lambda: {"a": 1}.keys(),
    "proxy": lambda: types.MappingProxyType({}),
    "store": distributed.HashStore,
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED.keys())
def test_a_copy_shares_what_cannot_be_copied(make: Any) -> None:
    model = Holding(make())
    copied: Any = copied_module(model)
    assert copied.held is model.held
    assert copied.layers[0].held is not model.layers[0].held
    assert copied.layers[0].weight is not model.layers[0].weight


def test_a_module_with_files_and_locks_is_planned(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        model, x = Holding([threading.Lock(), functional, file]), torch.randn(4, 8)
        plan = planner.plan(model, x, budget="min", costs="roofline")
        assert planner.verify(model, x, plan=plan, repeats=0).ok


def test_a_module_with_a_process_group_is_planned(tmp_path: Path) -> None:
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model, x = Holding(distributed.group.WORLD), torch.randn(4, 8)
        plan = planner.plan(model, x, budget="min", costs="roofline")
        assert planner.verify(model, x, plan=plan, repeats=0).ok
    finally:
        distributed.destroy_process_group()


def test_variables_of_threads_are_copied() -> None:
    local = threading.local()
    local.seen = [torch.zeros(2)]
    model = Holding(local)
    copied: Any = copied_module(model)
    copied.held.seen.append(1)
    assert len(local.seen) == 1
    assert copied.held.seen[0] is not local.seen[0]


def test_dictionaries_are_copied_with_what_is_in_them_and_on_them() -> None:
    module = nn.Linear(2, 2)
    shared = [1, 2]
    kept = OrderedDict(first=shared, second={"again": shared, (1, "key"): None})
    kept.version = [3]  # type: ignore[attr-defined]
    kept["itself"] = kept
    module.kept = kept  # type: ignore[assignment]
    copied: Any = copied_module(module).kept
    assert type(copied) is OrderedDict
    assert list(copied) == ["first", "second", "itself"]
    assert copied["itself"] is copied
    assert copied is not kept
    assert copied["first"] == shared
    assert copied["first"] is not shared
    assert copied["second"]["again"] is copied["first"]
    assert copied["second"][1, "key"] is None
    assert copied.version == [3]
    assert copied.version is not kept.version


def test_outside_of_our_copies_nothing_is_shared() -> None:
    copied_module(Holding(threading.Lock()))
    with pytest.raises(TypeError, match="pickle"):
        __import__("copy").deepcopy(threading.Lock())
    assert "__deepcopy__" not in vars(threading.Thread)


def test_an_error_names_the_attribute_that_is_not_copied() -> None:
    model = Holding(number for number in range(3))  # a step would take from it
    with pytest.raises(planner.CaptureError, match=r"attribute layers\.0\.held\.inside: .*generator"):
        planner.plan(model, torch.randn(4, 8), budget="min")


class Balanced(nn.Module):
    """Leaves a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        self.balance = y.softmax(-1).square().mean()
        return y

    def loss(self, y: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        return y.square().mean() + weight * self.balance


class Criterion:
    """A loss that holds its model."""

    def __init__(self, model: Balanced) -> None:
        self.model = model

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() + self.model.balance


class Trainer:
    """Holds its model, and is not called."""

    def __init__(self, model: Balanced) -> None:
        self.model = model

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() + self.model.balance


def around(model: Balanced) -> Any:
    """A loss that is a function within a function, and calls another."""

    def balance() -> torch.Tensor:
        return model.balance

    return lambda y: y.square().mean() + balance()


balanced = Balanced()


def with_global(y: torch.Tensor) -> torch.Tensor:
    """A loss that names a global variable."""
    return y.square().mean() + balanced.balance


LOSSES: dict[str, Any] = {
    "a method": lambda model: model.loss,
    "a partial": lambda model: functools.partial(model.loss, weight=0.5),
    "a function": lambda model: lambda y: y.square().mean() + model.balance,
    "functions": around,
    "an object": Criterion,
    "a method of an object": lambda model: Trainer(model).loss,
    "a global variable": lambda model: with_global,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_reads_what_the_forward_of_the_copy_left(kind: str) -> None:
    model = balanced if kind == "a global variable" else Balanced()
    planner.remove(model)
    x, loss = torch.randn(4, 8), LOSSES[kind](model)
    model(x)  # leaves one that belongs to an earlier step
    assert referring_to(loss, {}) is loss
    plan = planner.plan(model, x, budget="min", loss=loss, costs="roofline")
    assert all(p.grad is None for p in model.parameters())
    report = planner.verify(model, x, plan=plan, loss=loss, repeats=0)
    assert report.ok
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_a_function_in_the_place_of_forward_runs_the_copy() -> None:
    model = Balanced()
    inner = model.layers
    model.forward = lambda x: inner(x) + inner[0](x).mean()  # type: ignore[method-assign]
    x, loss = torch.randn(4, 8), torch.sum
    plan = planner.plan(model, x, budget="min", loss=loss, regions=["layers"], costs="roofline")
    assert len(plan.graphs) == 2
    assert planner.verify(model, x, plan=plan, loss=loss, repeats=0).ok


@pytest.mark.heavy
def test_a_plan_for_inductor_of_such_a_model_is_verified() -> None:
    model = Balanced()
    layers = model.layers

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layers(x)
        model.balance = y.softmax(-1).square().mean()
        return y

    model.forward = forward  # type: ignore[method-assign]
    x = torch.randn(4, 8)
    model(x)
    plan = planner.plan(model, x, budget="min", loss=model.loss, backend="inductor")
    report = planner.verify(model, x, plan=plan, loss=model.loss, repeats=0)
    assert report.ok, report.problems


class Watched(Balanced):
    """Keeps what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[torch.Tensor]] = {"first": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.seen["first"] = [x]
        return self.layers[2](self.layers[1](x))  # type: ignore[no-any-return]


def test_a_model_that_kept_results_of_a_forward_is_planned() -> None:
    model, x = Watched(), torch.randn(4, 8)
    model(x)
    kept = model.seen["first"]
    plan = planner.plan(model, x, budget="min", loss=torch.sum, costs="roofline")
    assert model.seen["first"] is kept
    assert planner.verify(model, x, plan=plan, loss=torch.sum, repeats=0).ok


class Featured(nn.Module):
    """Takes its features from what functions within its own constructor keep, or compute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), kind
        self.scale = nn.Parameter(torch.ones(()))
        kept = self.kept = {}
        scale = self.scale

        def keep(_module: nn.Module, _args: Any, result: torch.Tensor) -> None:
            self.kept["a"] = result * self.scale

        def keep_in_variable(_module: nn.Module, _args: Any, result: torch.Tensor) -> None:
            kept["a"] = result * scale

        def keep_in_default(
            scale: torch.Tensor, _m: Any, _args: Any, result: torch.Tensor, kept: Any = kept
        ) -> None:
            kept["a"] = result * scale

        hooks: dict[str, Any] = {
            "hook": keep,
            "hook and variables": keep_in_variable,
            "hook and defaults": functools.partial(keep_in_default, scale),
        }
        if kind in hooks:
            self.layers[1].register_forward_hook(hooks[kind])
        self.steps = {"all": [lambda x: self.layers[0](x), (lambda x: self.layers[1](x) * scale,)]}
        object.__setattr__(self.layers[0], "parent", weakref.ref(self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e6:  # the copy has data then
            x = -x
        if self.kind == "steps":
            first, (second,) = self.steps["all"]
            return self.layers[2](second(first(x))).square().mean()  # type: ignore[no-any-return]
        if self.kind == "weak reference":
            return (self.layers(x) * self.layers[0].parent().scale).square().mean()  # type: ignore[no-any-return]
        y = self.layers(x)
        return y.square().mean() + self.kept.pop("a").square().mean()  # type: ignore[no-any-return]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "kind", ["hook", "hook and variables", "hook and defaults", "steps", "weak reference"]
)
@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_hooks_functions_in_containers_and_weak_references_refer_to_the_copy(kind: str) -> None:
    model, x = Featured(kind), torch.randn(4, 8)
    plan = planner.plan(model, x, budget="min", costs="roofline")
    assert model.kept == {}
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    losses = [model(x), plan.apply(model)(x)]
    assert losses[0] == losses[1]
    later = planner.auto_checkpoint(Featured(kind), budget="min", costs="roofline")
    later(x).backward()


def test_functions_of_copies_keep_what_they_are_marked_with() -> None:
    model = Balanced()
    model.forward = torch.compiler.disable(model.forward)  # type: ignore[method-assign]
    copied: Any = copied_module(model)
    marks, theirs = vars(copied.forward), vars(model.forward)
    assert marks.keys() == theirs.keys()
    assert marks["_torchdynamo_disable"]
    assert marks["_torchdynamo_orig_callable"].__self__ is copied
    copied(torch.randn(4, 8))
    assert copied.balance.grad_fn is not None
    assert model.balance.grad_fn is None


class Refusing:
    """Cannot be copied, and says why."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Refusing":
        raise ValueError("there is one of these")


def test_an_error_of_the_users_own_copying_names_its_line() -> None:
    wanted = (
        r"attribute layers\.0\.held\.inside: ValueError: there is one of these, at .*test_module_copies\.py"
    )
    with pytest.raises(planner.CaptureError, match=wanted):
        planner.plan(Holding(Refusing()), torch.randn(4, 8), budget="min")


class _CopiesItself:
    def __copy__(self) -> str:
        return "of its own"


class _WithItsOwnCopy(nn.Linear, _CopiesItself):
    """Its own way to be copied is that of a class behind nn.Module."""


def test_a_class_behind_nn_module_copies_as_it_does() -> None:
    assert copy.copy(_WithItsOwnCopy(2, 2)) == "of its own"
    assert isinstance(copy.copy(nn.Linear(2, 2)), nn.Linear)
