"""Forwards that PyTorch cannot trace, for an error of its own, are followed by replays, and not by graphs."""

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import CaptureError, PlanWarning
from tests.residual_block import Block


class Degrees(tuple[int, ...]):
    """Cannot be asked for its length, as the irreducible representations of e3nn: Dynamo asks it."""

    def __len__(self) -> int:
        raise NotImplementedError


class Untraced(nn.Module):
    """Its forward has graphs, and fails when Dynamo says under what they hold."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.degrees: tuple[int, ...] = Degrees((2, 1))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for degree in self.degrees:
            x = x * degree
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_what_cannot_be_traced_is_replayed() -> None:
    torch.manual_seed(0)
    model, x = Untraced(), torch.randn(32, 16, requires_grad=True)
    with pytest.raises(CaptureError, match=r"test_untraced_functions.*backend='replay'"):
        planner.plan(model, (x,), budget="min", backend="graph")
    plan = planner.plan(model, (x,), budget="min")
    assert plan.coverage == "replayed"
    assert any("test_untraced_functions.py" in note for note in plan.notes)
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert not report.problems


def test_what_can_no_longer_be_traced_is_said() -> None:
    torch.manual_seed(0)
    model, x = Untraced(), torch.randn(32, 16)
    model.degrees = (2, 1)
    plan = planner.plan(model, (x,), budget="min", backend="graph")
    model.degrees = Degrees((2, 1))
    plan.apply(model)
    with pytest.warns(PlanWarning, match="cannot be captured"):
        model(x).backward()
