"""Parameters and inputs of classes of the user's that are tensors, or hold one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

import planner
from planner.choices import BackendChoice
from tests.side_by_side import exact_plan_of, no_plan_warnings

aten = torch.ops.aten


class Named(torch.Tensor):
    """A tensor under another name, as a library marks its own."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Opaque(torch.Tensor):
    """Holds a tensor that is read times a number, as quantised weights are; its gradient is a plain one."""

    inner: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, scale: float) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner, made.scale = inner, scale
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(self.inner.clone(), self.scale)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default, aten.zeros_like.default):
            return cls(func(args[0].inner, *args[1:], **(kwargs or {})), args[0].scale)
        plain = tree_map_only(Opaque, lambda t: t.inner * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Scaled(Opaque):
    """The same, which says what it holds."""

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["inner"], self.scale

    @staticmethod
    def __tensor_unflatten__(held: Mapping[str, torch.Tensor], scale: float, size: Any, stride: Any) -> Any:
        return Scaled(held["inner"], scale)


class Weighted(nn.Module):
    def __init__(self, of_class: Callable[[torch.Tensor], torch.Tensor], *, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(of_class(torch.randn(32, 64)), requires_grad=trained)
        self.last = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.gelu(x @ self.weight)).square().mean()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("of_class", [lambda t: t.as_subclass(Named), lambda t: Scaled(t, 0.5)])
def test_parameters_of_classes_of_the_users(
    of_class: Callable[[torch.Tensor], torch.Tensor], trained: bool
) -> None:
    torch.manual_seed(0)
    model, x = Weighted(of_class, trained=trained), torch.randn(64, 32)
    torch.manual_seed(0)
    twin = Weighted(of_class, trained=trained)
    plan = exact_plan_of(model, (x,))
    plan.apply(model)
    with no_plan_warnings():
        model(x).backward()
    twin(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("backend", ["auto", "replay"])
def test_tensors_that_do_not_say_what_they_hold_are_warned_of(backend: BackendChoice) -> None:
    def made() -> Weighted:
        torch.manual_seed(0)
        return Weighted(lambda t: Opaque(t, 0.5), trained=False)

    model, twin, x = made(), made(), torch.randn(64, 32)
    with pytest.warns(planner.PlanWarning, match="class Opaque, which runs operators in its own way"):
        plan = planner.plan(model, (x,), budget="min", backend=backend)
    plan.apply(model)
    with no_plan_warnings():
        model(x).backward()
    twin(x).backward()
    ours, theirs = model.last.weight.grad, twin.last.weight.grad
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)
    assert planner.verify(twin, (x,), plan=plan, repeats=1).problems == []
