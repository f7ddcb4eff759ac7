"""Small models with their plans applied, and the gradients that they leave."""

import torch
import torch.nn as nn

import planner
from planner.user_plan import Plan
from tests.small import small_gpt


def apply_plan(builder=small_gpt, budget="min", **options) -> tuple[nn.Module, tuple, Plan]:  # type: ignore[no-untyped-def]
    model, args, kwargs = builder()
    plan = planner.plan(model, args, kwargs, budget=budget, solver="sqrt_n", **options)
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
