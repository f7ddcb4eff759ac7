"""Gradients of what reads at indices, which are written into zeros: in place, as in eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner

_AT = torch.randint(0, 64, (4, 48, 16))
_ROWS = torch.randint(0, 48, (20,))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.gather(-1, _AT),
        lambda x: x[:, _ROWS],
        lambda x: x[_ROWS % 4, _ROWS],
        lambda x: x.index_select(1, _ROWS),
        lambda x: x.topk(5, -1).values,
        lambda x: x.median(-1).values,
    ],
    ids=["gather", "index", "indices", "index_select", "topk", "median"],
)
def test_gradients_of_what_reads_at_indices_take_no_more_than_eagers(read: Callable[..., Any]) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(read(self.layer(x)).square().mean())

    torch.manual_seed(0)
    model, x = Reads(), torch.randn(4, 48, 64)
    plan = planner.plan(model, (x,), budget="100%", solver="none")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert not report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert plan.predicted.dynamic_peak_bytes <= plan.baseline.dynamic_peak_bytes
