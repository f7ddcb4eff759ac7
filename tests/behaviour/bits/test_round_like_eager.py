"""Operators that Dynamo would take apart, into others that round differently, are planned whole."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner

Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FACTOR: Any = torch.tensor(0.37)


class Model(nn.Module):
    """An operation on three tensors that all get gradients."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation, self.weight = operation, nn.Parameter(3 * torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.operation(x * self.weight, x + self.weight, (x * self.weight).cos() + 1.7)
        return (y * self.weight).sin().sum()


def _lerp_lists(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: float) -> torch.Tensor:
    both = [x * 1.0, a * 1.0]
    torch._foreach_lerp_(both, [a * 2.0, b * 3.0], weight)
    return both[0] + both[1]


OPERATIONS: dict[str, Operation] = {
    "addcdiv": lambda x, a, b: torch.addcdiv(x, a, b, value=0.37),
    "addcdiv_": lambda x, a, b: (x * 1.0).addcdiv_(a, b, value=0.37),
    "addcdiv, by a tensor": lambda x, a, b: torch.addcdiv(x, a, b, value=FACTOR),
    "addcmul_, by a tensor": lambda x, a, b: (x * 1.0).addcmul_(a, b, value=FACTOR),
    "add_, by a tensor": lambda x, a, b: (x * 1.0).add_(a, alpha=FACTOR),
    "_foreach_lerp_": lambda x, a, b: _lerp_lists(x, a, b, 0.3),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_with_a_factor_is_as_without_a_plan(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(OPERATIONS[name]), torch.randn(32, 64)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", costs="roofline")
    report = planner.verify(model, (x,), plan=plan, repeats=1)
    assert not report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.parametrize("inside", [True, False])
def test_a_bilinear_product_under_autocast_is_cast_as_by_eager(inside: bool) -> None:
    """Its kernel calls products that autocast casts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.product = nn.Linear(5, 5), nn.Bilinear(5, 6, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
                return self.product(x * self.before.weight[0], y).float().square().mean()

    torch.manual_seed(0)
    model, inputs = Net(), (torch.randn(8, 5), torch.randn(8, 6))
    around = contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16)
    with around:
        plan = planner.plan(model, inputs, budget="min", solver="sqrt_n")
        report = planner.verify(model, inputs, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.parametrize(
    "factors", [{}, {"beta": 0.5, "alpha": 0.37}, {"beta": 0.3 + 0.1j, "alpha": 0.7 - 0.2j}]
)
def test_an_outer_product_is_added_in_place_as_by_eager(factors: dict[str, Any]) -> None:
    """To complex numbers: the kernel rounds otherwise in place."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = nn.ParameterList(
                torch.randn(size, dtype=torch.complex64) for size in ((5, 4), (5,), (4,))
            )

        def forward(self) -> torch.Tensor:
            y, a, b = self.sizes
            return torch.view_as_real((y * 1.0).addr_(a, b, **factors)).square().sum()

    torch.manual_seed(0)
    model = Net()
    plan = planner.plan(model, (), budget="min", solver="sqrt_n")
    report = planner.verify(model, (), plan=plan, repeats=0)
    assert report.ok, report.problems
