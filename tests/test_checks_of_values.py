"""A planned step ends with an error where the unplanned one does, as of values that the forward checks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner


class Checking(nn.Module):
    """Checks what its layers return."""

    def __init__(self, check: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.check = check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        self.check(y)
        return y.square().mean()  # type: ignore[no-any-return]


def asserts(y: torch.Tensor) -> None:
    assert torch.isfinite(y).all()


def raises(y: torch.Tensor) -> None:
    if torch.isnan(y).any():
        raise ValueError("not a number")


CHECKS: dict[str, Callable[[torch.Tensor], object]] = {
    "assert": asserts,
    "raise": raises,
    "torch._assert": lambda y: torch._assert(torch.isfinite(y).all(), "not a number"),
    "on the device": lambda y: torch._assert_async(torch.isfinite(y).all()),
    "a factorisation": lambda y: torch.linalg.cholesky(y.T @ y + torch.eye(8)),
}


IN_THE_GRAPH = (
    "on the device",
    "a factorisation",
)  # other checks decide what runs, which Inductor's plans refuse


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "eager") for kind in CHECKS),
        *(pytest.param(kind, "inductor", marks=pytest.mark.heavy) for kind in IN_THE_GRAPH),
    ],
)
def test_a_step_ends_with_an_error_as_without_a_plan(kind: str, backend: Any) -> None:
    model, x = Checking(CHECKS[kind]), torch.randn(4, 8)
    wrong = torch.full_like(x, float("nan"))
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        model(wrong)
    planner.plan(model, x, budget="min", costs="roofline", backend=backend).apply(model)
    model(x).backward()
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        model(wrong)
    model.zero_grad()
    model(x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
