"""Casts of weights under autocast, which PyTorch keeps until the user's context ends."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import planner


class Checkpointed(nn.Module):
    """A layer in a checkpoint of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False).square().mean()


def test_a_step_with_checkpoints_is_planned_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = planner.plan(Checkpointed(), torch.randn(32, 16), budget="100%", solver="sqrt_n")
    assert len(plan.graphs) == 1
