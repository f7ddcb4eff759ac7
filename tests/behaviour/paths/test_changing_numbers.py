"""Numbers that change with every step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch import dynamo
from planner.errors import PlanWarning
from planner.verification.measure import measure_peak
from tests.side_by_side import assert_same, assert_trains_alike, layers, left_by, no_plan_warnings, steps

pytestmark = pytest.mark.heavy


def _step(model: Any, x: torch.Tensor, beta: float | torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x) * beta
    return loss


def _annealed(step: Callable[..., torch.Tensor], kind: Callable[[float], Any]) -> Callable[[Any], None]:
    def loop(model: Any) -> None:
        for at in range(6):
            step(model, torch.ones(16, 32), kind(at / 8)).backward()
            model.zero_grad()

    return loop


def test_a_number_that_changes_is_told_of_and_a_tensor_is_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamo, "MANY_CAPTURES", 4)
    model, *_ = layers()
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    planned = planner.step(_step, budget="min", solver="sqrt_n", costs="roofline")
    with pytest.warns(PlanWarning, match="has been captured 4 times.*as a tensor") as told:
        ours = left_by(model, _annealed(planned, float))
    assert len(told) == 1
    assert_same(ours, left_by(twin, _annealed(_step, float)))
    with no_plan_warnings():
        left = left_by(third, _annealed(planned, torch.tensor))
    assert_same(left, ours)


class _Tasks(nn.Module):
    """A head for each task, of which each step names some."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.heads = nn.ModuleList(nn.Linear(32, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, tasks: tuple[int, ...]) -> list[torch.Tensor | None]:
        x = self.body(x)
        return [head(x) if i in tasks else None for i, head in enumerate(self.heads)]


def test_numbers_are_found_among_others_that_change() -> None:
    torch.manual_seed(0)
    model, x = _Tasks().train(), torch.randn(16, 32)
    planned = copy.deepcopy(model)

    def loss(outputs: list[torch.Tensor | None]) -> torch.Tensor:
        return torch.stack([y.square().mean() for y in outputs if y is not None]).sum()

    planner.plan(planned, (x, (0, 1)), loss=loss, budget="min", solver="sqrt_n").apply(planned)
    for tasks in ((0, 1), (2,), (0, 1), (1, 2), (2, 0)):
        gradients = []
        for each in (model, planned):
            each.zero_grad()
            outputs = each(x, tasks)
            assert [y is not None for y in outputs] == [i in tasks for i in range(3)]
            loss(outputs).backward()
            gradients.append([p.grad for p in each.parameters()])
        for ours, theirs in zip(*reversed(gradients), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


_STEPS = 0


class CountsOutside(nn.Module):
    """Counts its steps in a variable of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _STEPS
        x = self.first(x).tanh()
        _STEPS += 1
        return self.second(x).square().mean()


def test_a_number_outside_of_the_model_that_each_forward_changes() -> None:
    """Planning puts it back as it does attributes; each pass found another, and none was like the last."""
    model, x, before = CountsOutside().train(), torch.randn(2048, 16), _STEPS
    plan = planner.plan(model, x, budget="min", solver="sqrt_n")
    assert before == _STEPS
    assert planner.verify(model, x, plan=plan, repeats=0).gradients_equal
    assert before == _STEPS
    plan.apply(model)
    with no_plan_warnings():
        for step in range(6):
            model.zero_grad()
            assert before + step == _STEPS
            measured = measure_peak(lambda: model(x).backward(), "cpu").peak_bytes
    assert measured == plan.predicted.dynamic_peak_bytes
    # PyTorch 2.15 does not trace a function anew for a number that it only counts.
    once = torch.__version__ >= (2, 15)
    said = "an earlier one awaits its backward" if once else "has been captured 16 times"
    with pytest.warns(PlanWarning, match=said):
        left_by(model, lambda model: [model(x) for _ in range(10)])


class _Widths(nn.Module):
    """Parts that are alike in nothing but their class."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 16 * width), nn.GELU(), nn.Linear(16 * width, 32))
            for width in range(1, 6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x)
        return x.square().mean()


def test_regions_are_captured_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "MANY_CAPTURES", 4)
    torch.manual_seed(0)
    args = (torch.randn(64, 32),)
    assert_trains_alike(_Widths().train(), args, steps(args), expected_runs=None, regions="auto")
