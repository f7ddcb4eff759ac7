"""A planned step ends with an error where the unplanned one does, as of values that the forward checks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner

pytestmark = pytest.mark.heavy


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


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "auto") for kind in CHECKS),
        # Other checks decide what runs, which Inductor's plans refuse.
        pytest.param("on the device", "inductor", marks=pytest.mark.heavy),
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


class Voice(nn.Module):
    """Goes through a spectrum, as vocoders do; ``torch.istft`` checks its window."""

    def __init__(self, *, method: bool) -> None:
        super().__init__()
        self.before, self.after, self.method = nn.Linear(64, 64), nn.Linear(64, 64), method
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(self.before(x), 16, 4, window=self.window, return_complex=True)
        spectrum = spectrum * spectrum.abs().tanh()
        if self.method:
            y = spectrum.istft(16, 4, window=self.window)
        else:
            y = torch.istft(spectrum, 16, 4, window=self.window)
        return self.after(y).tanh().square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", [False, True])
def test_an_operator_that_checks_data_is_followed_by_replaying(method: bool) -> None:
    model, args = Voice(method=method), (torch.randn(4, 64),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert plan.coverage == "replayed"
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    with torch.no_grad():
        model.window.zero_()
    with pytest.raises(RuntimeError, match="window overlap add"):
        plan.apply(model)(*args)
