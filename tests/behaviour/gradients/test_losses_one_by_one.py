"""Several losses that need gradients of their own, as in PCGrad: what the warning advises works."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.verification.measure import measure_peak
from tests.side_by_side import no_plan_warnings, plan_of

Gradients = list[tuple[torch.Tensor, ...]]


class _Tasks(nn.Module):
    """A part that all tasks share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(*[p for _ in range(6) for p in (nn.Linear(64, 64), nn.GELU())])
        self.heads = nn.ModuleList(nn.Linear(64, 8) for _ in range(2))

    def losses(self, shared: torch.Tensor) -> list[torch.Tensor]:
        return [head(shared).square().mean() for head in self.heads]


def _one_forward(model: _Tasks, x: torch.Tensor) -> Gradients:
    losses, weights = model.losses(model.shared(x)), [*model.shared.parameters()]
    return [torch.autograd.grad(loss, weights, retain_graph=loss is not losses[-1]) for loss in losses]


def _a_forward_each(model: _Tasks, x: torch.Tensor) -> Gradients:
    weights = [*model.shared.parameters()]
    return [torch.autograd.grad(head(model.shared(x)).square().mean(), weights) for head in model.heads]


def _planned() -> tuple[_Tasks, _Tasks, torch.Tensor, Any]:
    torch.manual_seed(0)
    model, x = _Tasks(), torch.randn(1024, 64)
    unplanned = copy.deepcopy(model)
    plan = plan_of(model.shared, (x,))
    plan.apply(model.shared)
    return model, unplanned, x, plan


def test_a_forward_for_each_loss_stays_within_the_prediction() -> None:
    model, unplanned, x, plan = _planned()
    with no_plan_warnings():
        found = _a_forward_each(model, x)
        peak = measure_peak(lambda: _a_forward_each(model, x), "cpu").peak_bytes
    kept = sum(p.nbytes for p in model.shared.parameters())
    assert peak <= plan.predicted.dynamic_peak_bytes + kept
    for ours, theirs in zip(found, _one_forward(unplanned, x), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_one_forward_takes_as_much_more_as_is_said() -> None:
    model, unplanned, x, plan = _planned()
    with pytest.warns(planner.PlanWarning, match="call the planned part once for each loss") as said:
        found = _one_forward(model, x)
    assert len(said) == 1
    assert all(map(torch.equal, found[0] + found[1], sum(_one_forward(unplanned, x), ())))
    line = plan.timeline
    kept = line.bytes[line.forward_length - 1] + sum(p.nbytes for p in model.shared.parameters())
    peak = measure_peak(lambda: _one_forward(model, x), "cpu").peak_bytes
    assert plan.predicted.dynamic_peak_bytes < peak <= plan.predicted.dynamic_peak_bytes + kept
