"""What a forward does with numpy is numpy's: its roundings, its random numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn

import planner
from planner.user_plan import Plan
from tests.side_by_side import assert_trains_alike, layers, steps

Use = Callable[["Uses", torch.Tensor], torch.Tensor]


class Uses(nn.Module):
    """Two layers, and between them something with numpy."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.use, self.scale = use, np.sqrt(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.use(self, torch.tanh(self.first(x)))
        return torch.tanh(self.second(y)).square().mean()


def _number(_model: Uses, y: torch.Tensor) -> torch.Tensor:
    return y / np.sqrt(y.shape[-1]) * np.log(7.3)


def _attribute(model: Uses, y: torch.Tensor) -> torch.Tensor:
    return y / model.scale


def _array(_model: Uses, y: torch.Tensor) -> torch.Tensor:
    return y * torch.tensor(np.random.rand(32), dtype=torch.float32)


def _order(_model: Uses, y: torch.Tensor) -> torch.Tensor:
    return y[:, torch.from_numpy(np.random.permutation(32))]


def _normal(_model: Uses, y: torch.Tensor) -> torch.Tensor:
    return y + torch.as_tensor(np.random.normal(size=32).astype("float32"))


def _rounded(_model: Uses, y: torch.Tensor) -> torch.Tensor:
    return y + torch.from_numpy(np.exp(-np.abs(y.detach().numpy())).astype("float32"))


def _trains(use: Use) -> Plan:
    model, args, _ = layers(lambda: Uses(use))
    np.random.seed(0)
    return assert_trains_alike(model, args, steps(args), expected_runs=None)


@pytest.mark.parametrize(
    "use",
    [
        _normal,
        _number,
        *(pytest.param(use, marks=pytest.mark.heavy) for use in (_attribute, _array, _order, _rounded)),
    ],
)
def test_numpy_draws_and_computes_as_without_a_plan(use: Use) -> None:
    _trains(use)


class Masked(nn.Module):
    """Writes a token where a mask is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.token = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1.5
        self.write(y, mask)
        return torch.tanh(self.second(torch.tanh(self.second(y)))).square().mean()

    def write(self, y: torch.Tensor, mask: torch.Tensor) -> None:
        y[mask] = self.token


class MaskedByMethod(Masked):
    """The same in other words, which Dynamo does not tell from a write at plain indices."""

    def write(self, y: torch.Tensor, mask: torch.Tensor) -> None:
        y.index_put_((mask,), self.token)


@pytest.mark.heavy
def test_a_token_that_is_written_through_a_mask() -> None:
    torch.manual_seed(0)
    model, inputs = Masked().train(), (torch.randn(8, 16, 32), torch.rand(8, 16) < 0.3)
    plan = planner.plan(model, inputs, budget="min", solver="sqrt_n")
    assert plan.coverage == "several-graphs"
    report = planner.verify(model, inputs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_what_cannot_be_traced_when_it_runs_is_warned_of() -> None:
    torch.manual_seed(0)
    model, inputs = MaskedByMethod().train(), (torch.randn(8, 16, 32), torch.rand(8, 16) < 0.3)
    plan = planner.plan(model, inputs, budget="min", solver="sqrt_n")
    with pytest.warns(planner.PlanWarning, match="data decide"):
        report = planner.verify(model, inputs, plan=plan, repeats=0)
    assert len(report.problems) == 1
    assert "over the prediction" in report.problems[0]
