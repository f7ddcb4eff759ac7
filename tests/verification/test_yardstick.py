"""How near a step that rounds otherwise must be to the step in double precision."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.training_step.step import Step
from planner.verification.outcomes import Outcome
from planner.verification.yardstick import Yardstick


def _yardstick(exact: float, eager: float) -> Yardstick:
    def outcome(value: float, dtype: torch.dtype = torch.float32) -> Any:
        return SimpleNamespace(tensors={"bias": torch.tensor([value], dtype=dtype)})

    made = Yardstick.__new__(Yardstick)
    made._eager, made._inductor, made._exact = outcome(eager), outcome(eager), outcome(exact, torch.float64)
    made._times = 1.5
    return made


@pytest.mark.parametrize(
    ("exact", "eager", "planned", "near"),
    [
        (1.0, 1.0 + 1e-4, 1.0 - 1.4e-4, True),
        (1.0, 1.0 + 1e-4, 1.0 - 1.7e-4, False),
        (7e-19, 1e-10, -6e-10, True),  # zero but for roundings, as the gradient of a bias of keys
        (7e-19, 1e-10, 1e-9, False),
        (7e-19, 1e-10, 1e-2, False),
    ],
)
def test_a_step_may_be_so_far_from_the_exact_one(
    exact: float, eager: float, planned: float, near: bool
) -> None:
    assert _yardstick(exact, eager).holds("bias", torch.tensor([planned])) is near


@pytest.mark.parametrize(("error", "near"), [(1e-3, True), (1e-7, False)])
def test_a_loss_that_happens_to_be_exact_is_asked_no_more_than_gradients_are(
    error: float, near: bool
) -> None:
    made, weight = _yardstick(1.0, 1.0), torch.rand(64, generator=torch.Generator().manual_seed(0))
    made._exact.tensors["weight"] = weight.double()
    made._eager.tensors["weight"] = made._inductor.tensors["weight"] = weight + error
    assert made.holds("bias", torch.tensor([1.0 + 1e-3])) is near
    assert not made.holds("bias", torch.tensor([1.01]))


class Complex(torch.nn.Module):
    """Products of real and of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.real = torch.nn.Linear(8, 8)
        self.complex = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.complex(self.real(x.real), x.imag) @ self.complex).abs().mean()


def test_complex_numbers_are_in_double_precision_too() -> None:
    torch.manual_seed(0)
    model, step = Complex(), Step((torch.randn(4, 8, dtype=torch.cfloat),), {})
    made = Yardstick(model, step, None, lambda: None, Outcome(model, step))
    assert made.problem is None
    assert {t.dtype for t in made._exact.tensors.values() if t is not None} == {
        torch.float64,
        torch.complex128,
    }
