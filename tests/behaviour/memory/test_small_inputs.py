"""Files and modules that are nearly right: they are read, or the error says what they are."""

from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanFileError, PlanMismatch
from planner.runtime.install import installed_plan
from tests.planned import planned_gpt


def test_a_plan_can_be_hashed_as_its_equals_are() -> None:
    plan = planned_gpt().plan
    assert len({plan, planner.Plan.loads(plan.dumps())}) == 1


def test_a_plan_file_may_begin_with_a_mark_and_is_utf_8(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", planned_gpt().plan
    path.write_text(plan.dumps(), encoding="utf-8-sig")
    assert planner.Plan.load(path) == planner.Plan.loads(plan.dumps())
    path.write_text(plan.dumps(), encoding="utf-16")
    with pytest.raises(PlanFileError, match="UTF-16 or UTF-32, expected UTF-8"):
        planner.Plan.load(path)


def test_a_parameter_without_a_shape_is_named() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4)), torch.randn(3, 5)
    with pytest.raises(PlanMismatch, match=r"0\.weight has no shape yet.*after one forward"):
        planner.plan(model, (x,), budget="min")
    plan = planner.plan(nn.Sequential(nn.Linear(5, 4)), (x,), budget="min", costs="roofline")
    for refused in (
        lambda: planner.auto_checkpoint(model, (x,), budget="min"),
        lambda: planner.estimate(model, (x,)),
        lambda: planner.verify(model, (x,), plan=plan),
        lambda: plan.apply(model),
        lambda: planner.step(lambda m, b: m(b).sum(), budget="min")(model, x),
    ):
        with pytest.raises(PlanMismatch, match=r"0\.weight has no shape yet.*after one forward"):
            refused()


class Lazy(nn.Module):
    """Layers that get their shapes, and buffers, from what they are first called with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.nn.functional.gelu(self.norm(self.first(x))))
        loss: torch.Tensor = self.last(x).square().mean()
        return loss


def test_layers_without_shapes_run_once_and_are_then_planned(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64, 8)
    planned, eager = Lazy(), Lazy()
    planner.auto_checkpoint(planned, budget="min", costs="roofline")
    for step in range(3):
        for model in (planned, eager):
            torch.manual_seed(step)
            model(x).backward()
        assert (installed_plan(planned) is not None) == (step > 0)
        for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        for buffer, other in zip(planned.buffers(), eager.buffers(), strict=True):
            assert torch.equal(buffer, other)
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.startswith("planner: Lazy runs once without a plan, as first.weight has no shape yet")
    assert second.startswith("planner: Lazy planned for min")


def test_a_kernel_of_a_gpu_is_not_used_on_the_cpu_and_said_so() -> None:
    class Squares(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    with pytest.warns(planner.PlanWarning, match="attention='flash' is for plans for a GPU"):
        planner.plan(Squares(4, 4), (torch.randn(2, 4),), budget="100%", attention="flash")
