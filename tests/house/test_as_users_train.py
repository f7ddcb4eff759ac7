"""Programs that train as users do leave the same with plans as without; verdicts tell where they do not."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import as_users_train, users
from benchmarks.as_users_train import differences, markdown, measure, verdict
from benchmarks.users.training import PROGRAMS, Training

pytestmark = pytest.mark.heavy

OPTIONS = {"budget": "70%", "solver": "sqrt_n", "costs": "roofline"}
QUICK = ("deeponet", "vq_vae")
HEAVY = ("maml", "gaussian_splats")


def _check(name: str) -> None:
    users.everything()
    row = measure(name, OPTIONS)
    assert verdict(row) in ("equal", "warned", "unplanned"), row
    assert not row["differs"]


@pytest.mark.parametrize("name", QUICK)
def test_a_program_trains_by_plans_as_without(name: str) -> None:
    _check(name)


@pytest.mark.parametrize("name", HEAVY)
def test_a_larger_program_trains_by_plans_as_without(name: str) -> None:
    _check(name)


def test_programs_of_every_family_are_there() -> None:
    users.everything()
    assert {users.family_of(name) for name in PROGRAMS} == set(users.FAMILIES)
    assert len(PROGRAMS) >= 25
    assert all(function.__doc__ for function in PROGRAMS.values())


class Trained(nn.Module):
    def __init__(self, wrong: float) -> None:
        super().__init__()
        self.linear, self.wrong = nn.Linear(16, 16), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).tanh() + self.wrong).square().mean()


def trained(training: Training, *, wrong: bool = False, planned: bool = True) -> dict[str, Any]:
    """A program; a wrong one computes something else where it is planned."""
    model: Any = Trained(1e-6 if wrong and training.planned else 0.0)
    model = training.model(model) if planned else model
    for _ in range(2):
        x = torch.randn(64, 16)
        model.zero_grad()
        loss = training.run(model, lambda x=x: model(x).backward())
    return {"loss": loss, "model": model}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "equal"), ({"wrong": True}, "silent"), ({"planned": False}, "silent")],
)
def test_what_differs_and_what_is_not_planned_is_a_fault(
    options: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(training: Training) -> dict[str, Any]:
        return trained(training, **options)

    program.__module__ = "benchmarks.users.made_up"
    monkeypatch.setitem(PROGRAMS, "made_up", program)
    row = measure("made_up", OPTIONS)
    assert verdict(row) == expected, row
    assert (expected in as_users_train.FAULTS) == (expected != "equal")
    assert expected in markdown([row], "python benchmarks/as_users_train.py")


def test_a_peak_over_its_prediction_is_a_fault_without_a_warning() -> None:
    part = {"plan": True, "before": 9, "unplanned": 9, "predicted": 5, "limit": 5, "measured": 6}
    row = {"model": "a", "differs": [], "warnings": [], "parts": {"step": part}}
    assert verdict(row) == "silent"
    assert verdict(row | {"warnings": ["may exceed the budget"]}) == "warned"
    assert verdict(row | {"differs": ["weight differs"], "warnings": ["may exceed the budget"]}) == "wrong"
    assert verdict(row | {"differs": ["weight differs"], "warnings": ["in the last bits"]}) == "told"
    assert verdict(row | {"parts": {"step": part | {"measured": 5}}}) == "equal"
    assert verdict(row | {"parts": {"step": part | {"limit": 6}}}) == "equal"  # larger inputs, in the budget
    assert verdict(row | {"failed": "RuntimeError: out of order"}) == "failed"


def test_differences_are_named() -> None:
    one = {"weight": torch.zeros(2), "seed": 1, "gradient": None, "nan": torch.tensor(float("nan"))}
    other = {"weight": torch.tensor([0.0, 1e-8]), "seed": 1, "gradient": torch.zeros(1), "nan": one["nan"]}
    assert differences(one, dict(one)) == []
    assert differences(one, other) == ["gradient differs", "weight differs by 1e-08 of 0"]
    assert differences(one, one | {"more": 1}) == ["more is there on one side only"]
