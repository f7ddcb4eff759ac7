"""Small models with their plans applied, and the gradients that they leave."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

import planner
from planner.user_plan import Plan
from tests.small import small_gpt
from tests.zoo import Built


def gpt(batch: int = 4) -> Built:
    """Two layers."""
    return small_gpt(batch, layers=2)


def plan_for(builder: Callable[[], Any] = gpt) -> Plan:
    """The plan of a built model, made once for each builder."""
    return _planned(builder)


@functools.cache
def _planned(builder: Callable[[], Any]) -> Plan:
    model, args, kwargs = builder()
    return planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")


def apply_plan(builder: Callable[[], Any] = gpt) -> tuple[nn.Module, tuple, Plan]:  # type: ignore[type-arg]
    """A new model with its plan applied, its arguments, and the plan, which tests share."""
    model, args, _ = builder()
    plan = plan_for(builder)
    return plan.apply(model), args, plan


def gradients_of(model: nn.Module, args: tuple, seed: int = 1) -> list[torch.Tensor | None]:  # type: ignore[type-arg]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(*args).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)
