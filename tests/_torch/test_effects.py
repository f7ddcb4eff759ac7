"""Operators that are called for their effects."""

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import CaptureError
from tests.side_by_side import no_plan_warnings, plan_of


class Counting(nn.Module):
    """Layers around an operator of a user's that is registered as one with effects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(torch.ops.planner_tests.counted_calls(torch.sigmoid(layer(x))))
        return x.square().mean()


def test_what_has_effects_is_left_to_replays() -> None:
    calls: list[int] = []
    with torch.library._scoped_library("planner_tests", "FRAGMENT"):

        @torch.library.custom_op("planner_tests::counted_calls", mutates_args=())
        def counted(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.numel())
            return x * 2

        counted.register_fake(torch.empty_like)
        counted.register_autograd(lambda _context, gradient: gradient * 2)
        counted.register_effect(torch.library.EffectType.ORDERED)
        torch.manual_seed(0)
        model, x = Counting(), torch.randn(64, 16)
        with pytest.raises(CaptureError, match=r"counted_calls.*torch\.compiler\.disable"):
            plan_of(model, (x,), backend="graph")
        with no_plan_warnings():
            planner.plan(model, (x,), budget="100%").apply(model)
            calls.clear()
            model(x).backward()
    assert calls == [x.numel()] * 3
