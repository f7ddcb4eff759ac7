"""Tensors made of lists of numbers in the forward may decide sizes: training follows the plan there."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner


class Sized(nn.Module):
    """Picks rows by a list, and goes through layers."""

    def __init__(self, pick: "Callable[[Sized, torch.Tensor], torch.Tensor]") -> None:
        super().__init__()
        self.pick, self.rows = pick, [1, 0, 2, 1]
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.pick(self, x)).square().mean()  # type: ignore[no-any-return]


def written(_model: Sized, x: torch.Tensor) -> torch.Tensor:
    kept = torch.tensor([1, 0, 1, 1])
    kept[0] = 0
    return x[kept > 0]


PICKS: dict[str, Callable[[Sized, torch.Tensor], torch.Tensor]] = {
    "repeated": lambda model, x: x.repeat_interleave(torch.tensor(model.rows), 0),
    "nonzero": lambda model, x: x[torch.tensor(model.rows).nonzero()[:, 0]],
    "a mask": lambda model, x: x[torch.tensor([0.1, 0.9, 0.7, 0.2]) > 0.5],
    "distinct": lambda model, x: x[torch.unique(torch.tensor(model.rows))],
    "written": written,
}


@pytest.mark.parametrize("kind", PICKS)
def test_a_step_follows_its_plan_where_a_list_decides_sizes(kind: str) -> None:
    model, x = Sized(PICKS[kind]), torch.randn(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, x, budget="min", costs="roofline")
        report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_another_list_is_captured_again() -> None:
    model, x = Sized(PICKS["repeated"]), torch.randn(4, 16)
    planner.plan(model, x, budget="min", costs="roofline").apply(model)
    model(x).backward()
    expected = Sized(PICKS["repeated"])
    expected.load_state_dict(model.state_dict())
    for each in (model, expected):
        each.zero_grad()
        each.rows = [3, 0, 0, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)  # of another size than planned
        model(x).backward()
    expected(x).backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("kind", PICKS)
def test_inductor_s_plans_refuse_it_in_one_line(kind: str) -> None:
    model, x = Sized(PICKS[kind]), torch.randn(4, 16)
    with pytest.raises(
        planner.CaptureError, match=r"needs sizes that do not depend on data.*backend='eager'"
    ):
        planner.plan(model, x, budget="min", costs="roofline", backend="inductor")


def test_inductor_s_plans_take_rows_by_number() -> None:
    rows, times = torch.tensor([3, 1, 1]), torch.tensor([1, 2, 0])
    model = Sized(lambda _, x: x[rows].repeat_interleave(times, 0, output_size=3))
    plan = planner.plan(model, torch.randn(4, 16), budget="min", costs="roofline", backend="inductor")
    assert plan.fusion is not None
