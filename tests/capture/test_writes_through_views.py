"""Writes in place to parts of tensors, as a parallel scan makes them: traced, each is a copy of the whole."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import PlanWarning
from tests.side_by_side import assert_same, left_by, steps

pytestmark = pytest.mark.heavy


def _sums(x: Tensor) -> Tensor:
    """Running sums along the first dimension, by writes to each second, fourth, eighth row."""
    x, count = x.clone(), len(x)
    levels = int(math.log2(count))
    for level in range(levels):
        stride = 2 ** (level + 1)
        x[stride - 1 :: stride].add_(x[stride // 2 - 1 :: stride])
    for level in reversed(range(levels - 1)):
        stride = 2 ** (level + 1)
        x[stride + stride // 2 - 1 :: stride].add_(x[stride - 1 : -1 : stride])
    return x


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sums(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sums(gradient.flip(0)).flip(0)


class Scans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Scan.apply(layer(x)) / len(x)  # type: ignore[no-untyped-call]
        return x.square().mean()


class WritesOnce(Scans):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        x = x.clone()
        x[0] = 0
        return x.square().mean()


def test_the_scan_is_right() -> None:
    x = torch.randn(64, 16, dtype=torch.float64)
    assert torch.allclose(_sums(x), x.cumsum(0))


@pytest.mark.graphs
def test_a_step_that_is_slower_as_traced_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = Scans(), torch.randn(2048, 16)
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="150%", costs="roofline")
    with pytest.warns(PlanWarning, match=r"\d+ writes in place.*\d+% longer.*Plan with backend='replay'"):
        ours = left_by(model, steps((x,)))
    assert_same(ours, left_by(twin, steps((x,))))
    line = capsys.readouterr().err
    assert "Scans planned for 150%" in line
    assert "+0 % time" not in line


def test_one_write_is_not_worth_telling() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        plan = planner.plan(WritesOnce(), torch.randn(2048, 16), budget="150%", costs="roofline")
    assert not any("writes in place" in note for note in plan.notes)
