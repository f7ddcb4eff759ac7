"""Files and modules that are nearly right: they are read, or the error says what they are."""

from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanFileError, PlanMismatch
from tests.planned import planned_gpt


def test_a_plan_can_be_hashed_as_its_equals_are() -> None:
    plan = planned_gpt().plan
    assert len({plan, planner.Plan.loads(plan.dumps())}) == 1


def test_a_plan_file_may_begin_with_a_mark_and_is_utf_8(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", planned_gpt().plan
    path.write_text(plan.dumps(), encoding="utf-8-sig")
    assert planner.Plan.load(path) == planner.Plan.loads(plan.dumps())
    path.write_text(plan.dumps(), encoding="utf-16")
    with pytest.raises(PlanFileError, match="UTF-16, expected UTF-8"):
        planner.Plan.load(path)


def test_a_parameter_without_a_shape_is_named() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4)), torch.randn(3, 5)
    with pytest.raises(PlanMismatch, match=r"0\.weight has no shape yet.*after one forward"):
        planner.plan(model, (x,), budget="min")
    with pytest.raises(PlanMismatch, match=r"0\.weight has no shape yet"):
        planner.auto_checkpoint(model, budget="min")


def test_a_kernel_of_a_gpu_is_not_used_on_the_cpu_and_said_so() -> None:
    class Squares(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    with pytest.warns(planner.PlanWarning, match="attention='flash' is for plans for a GPU"):
        planner.plan(Squares(4, 4), (torch.randn(2, 4),), budget="100%", attention="flash")
