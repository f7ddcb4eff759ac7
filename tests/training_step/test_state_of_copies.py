"""Copies of modules have their state, and copies of planned ones the plan, whatever their classes do."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.module_copies import copied_module
from planner.training_step.copies import described


class Generated(nn.Module):
    """Writes its layer to bytes, and has one more buffer, or one fewer, when it reads that."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.layer, self.more = nn.Linear(8, 8), more
        self.layer.register_buffer("scale", torch.ones(8))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self), _modules={})
        return state | {"layer": pickle.dumps(self.layer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        layer = pickle.loads(state.pop("layer"))
        super().__setstate__(state)
        self.layer = layer
        if self.more:
            layer.register_buffer("constant", torch.ones(8))
        else:
            layer.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.layer.scale).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("more", [True, False])
def test_a_copy_has_the_state_of_the_module_whatever_its_class_writes_and_reads(more: bool) -> None:
    model, x = Generated(more), torch.randn(4, 8)
    assert len([*pickle.loads(pickle.dumps(model)).buffers()]) == (2 if more else 0)
    copied = copied_module(model)
    assert [name for name, _ in copied.named_buffers()] == ["layer.scale"]
    plan = planner.plan(model, x, budget="min", costs="roofline")
    assert planner.verify(model, x, plan=plan, repeats=0).ok


def test_a_copy_without_some_of_the_state_is_an_error() -> None:
    class Losing(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            return nn.Linear(8, 8, bias=False)

    model, x = nn.Sequential(nn.Linear(8, 8), Losing(8, 8)), torch.randn(4, 8)
    with pytest.raises(planner.CaptureError, match="gives 3 parameters and buffers, and the module has 4"):
        planner.plan(model, x, budget="min", loss=lambda y: y.square().mean())


class Counting(nn.Module):
    """Hooks count calls, and keep gradients, on the parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for parameter in self.layer.parameters():
            parameter.calls, parameter.total = 0, [torch.zeros(())]  # type: ignore[attr-defined]
        self.layer.register_forward_hook(_count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


@torch.compiler.disable
def _count(layer: nn.Module, _args: object, output: torch.Tensor) -> None:
    for parameter in layer.parameters():
        parameter.calls += 1  # type: ignore[attr-defined]
        parameter.total[0] += output.detach().sum()  # type: ignore[attr-defined]


def test_what_is_set_on_parameters_is_there_while_the_step_is_planned() -> None:
    torch.manual_seed(0)
    model, twin, x = Counting(), Counting(), torch.randn(4, 8)
    twin.load_state_dict(model.state_dict())
    plan = planner.plan(model, x, budget="min", costs="roofline")
    assert planner.verify(model, x, plan=plan, repeats=0).ok
    assert all(p.calls == 0 and p.total == [0] for p in model.parameters())  # type: ignore[attr-defined]
    plan.apply(model)
    for _ in range(3):
        for module in (model, twin):
            module.zero_grad()
            module(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        assert ours.calls == theirs.calls == 3  # type: ignore[attr-defined]
        assert ours.total == theirs.total  # type: ignore[attr-defined]


class HandingOn(nn.Module):
    """Asks its part for attributes that it has not got itself, as wrappers do."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.part, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_planned_module_that_hands_on_attributes_is_copied_with_its_plan(copied: Any) -> None:
    torch.manual_seed(0)
    model = HandingOn(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    x = torch.randn(4, 8)
    with pytest.raises(RecursionError):
        getattr(object.__new__(HandingOn), "anything")  # noqa: B009
    planner.plan(model, x, budget="min", costs="roofline").apply(model)
    twin = copied(model)
    assert planner.verify(twin, x, repeats=0).ok
    for module in (model, twin):
        module(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class Once(Counting):
    """Refuses a second call before the count is set back, as private training refuses to add up steps."""

    def __init__(self, decide: bool) -> None:
        super().__init__()
        self.decide = decide
        self.layer.register_forward_pre_hook(_refuse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if self.decide and y > 1000 else y


@torch.compiler.disable
def _refuse(layer: nn.Module, _args: object) -> None:
    if any(parameter.calls for parameter in layer.parameters()):  # type: ignore[attr-defined]
        raise RuntimeError("called twice")


@pytest.mark.parametrize("decide", [False, True])  # if data decide, the step runs with data
def test_each_pass_begins_with_what_is_set_on_parameters(decide: bool) -> None:
    model = Once(decide)
    planner.plan(model, torch.randn(4, 8), budget="min", costs="roofline")
    assert all(p.calls == 0 and p.total == [0] for p in model.parameters())  # type: ignore[attr-defined]


def test_the_words_of_an_error_end_once() -> None:
    error = RuntimeError("It cannot be traced.\n  Explanation: It is too strange.\n")
    assert described("tracing", error) == "tracing failed: RuntimeError: It cannot be traced. " + (
        "Explanation: It is too strange"
    )
