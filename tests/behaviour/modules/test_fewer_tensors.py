"""Steps with more or fewer tensors among their inputs than planned, under auto_checkpoint."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.runtime.shapes.policy import MOST_PLANS


class OfMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([self.body(part).square().mean() for part in parts]).sum()


def _gradients(model: nn.Module, parts: Sequence[Tensor]) -> list[Tensor | None]:
    model.zero_grad()
    model(parts).backward()
    return [p.grad for p in model.parameters()]


def _check(numbers: Sequence[int]) -> None:
    torch.manual_seed(0)
    model, parts = OfMany(), [torch.randn(64, 32) for _ in range(max(numbers))]
    eager = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="90%", costs="roofline")
    for number in numbers:
        ours, expected = (_gradients(each, parts[:number]) for each in (model, eager))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_fewer_tensors_get_a_plan_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    _check([3, 2, 2, 3, 1])
    assert capsys.readouterr().err.count("planned again for other inputs") == 2


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_the_plans_for_other_tensors_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    _check([MOST_PLANS + 3, *range(1, MOST_PLANS + 3)])
    assert capsys.readouterr().err.count("planned again") < MOST_PLANS
