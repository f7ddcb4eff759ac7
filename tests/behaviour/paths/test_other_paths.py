"""Forwards that data lead along paths that the plan has not seen, as masks of which not all is set do."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanWarning
from tests.side_by_side import no_plan_warnings, peak_of

pytestmark = pytest.mark.heavy

ALL, SOME = torch.ones(1024, 1, dtype=torch.bool), (torch.arange(1024) > 9)[:, None]
UNSEEN = "took a path that the plan has not seen"


class Masked(nn.Module):
    """Layers that do more, or as much, where a mask is to be looked at."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.more = more
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        needed = None if mask.all() else mask
        for layer in self.layers:
            y = layer(x).sin()
            if needed is not None:
                y = y * torch.where(needed, y.cos(), y.exp()) if self.more else y.cos()
            else:
                y = y.tanh()
            x = x + y
        return x.square().mean()


def _step(model: nn.Module, mask: torch.Tensor) -> None:
    """A step with gradients as those of a twin."""
    x = torch.randn(len(mask), 32, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(model)
    planner.remove(twin)
    for one in (model, twin):
        one.zero_grad()
        one(x, mask).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.equal(ours.grad, theirs.grad), name


def _peak(model: nn.Module, mask: torch.Tensor) -> int:
    """What a step takes at most over what was there."""
    return peak_of(model, (torch.randn(len(mask), 32), mask))


def _planned(model: nn.Module, mask: torch.Tensor, budget: str) -> tuple[planner.Plan, int]:
    plan = planner.plan(model, (torch.randn(1024, 32), mask), budget=budget)
    plan.apply(model, on_new_shape="replan")
    assert plan.target.budget_bytes is not None
    return plan, plan.target.budget_bytes - plan.resident.total


@pytest.mark.graphs
def test_a_path_that_takes_more_is_planned_within_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    model = Masked(more=True)
    plan, room = _planned(model, ALL, "70%")
    with no_plan_warnings():
        _step(model, ALL)
        assert _peak(model, ALL) == plan.predicted.dynamic_peak_bytes
    with pytest.warns(PlanWarning, match=UNSEEN):
        assert _peak(model, SOME) > room
    assert "planned again" not in capsys.readouterr().err
    _step(model, SOME)
    assert "Masked planned again for another path of its forward: " in capsys.readouterr().err
    with pytest.warns(PlanWarning, match=UNSEEN):  # the first time by the new plan
        _step(model, ALL)
    with no_plan_warnings():
        _step(model, ALL)
        assert all(_peak(model, mask) <= room for mask in (SOME, ALL, SOME, ALL))
    assert "Masked takes " in capsys.readouterr().err


@pytest.mark.graphs
def test_it_is_planned_at_the_largest_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    model = Masked(more=True)
    room = _planned(model, ALL, "70%")[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        for mask in (ALL, SOME[:500], SOME[:400], SOME[:300]):  # the first of a shape is captured again
            _step(model, mask)
        assert "Masked planned again for another path of its forward: " in capsys.readouterr().err
        for mask in (ALL, ALL, SOME):
            _step(model, mask)
    with no_plan_warnings():
        assert all(_peak(model, mask) <= room for mask in (SOME, SOME[:500], ALL))


@pytest.mark.graphs
def test_a_path_that_fits_runs_by_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    model = Masked(more=False)
    room = _planned(model, ALL, "70%")[1]
    with no_plan_warnings():
        _step(model, ALL)
    with pytest.warns(PlanWarning, match=UNSEEN):
        _step(model, SOME)
    with no_plan_warnings():
        _step(model, SOME)
        assert all(_peak(model, mask) <= room for mask in (SOME, ALL))
    said = capsys.readouterr().err
    assert "Masked takes " in said
    assert " on that path, by the same plan" in said
    assert "planned again" not in said


@pytest.mark.graphs
def test_a_path_that_no_plan_fits_is_told() -> None:
    model = Masked(more=True)
    least = planner.plan(model, (torch.randn(1024, 32), ALL), budget="min").predicted.peak_bytes
    _planned(model, ALL, f"{least} B")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        for mask in (ALL, SOME, SOME, SOME, ALL):
            _step(model, mask)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2
    assert UNSEEN in said[0]
    assert "the path that the forward took is not planned, and may exceed the budget: budget " in said[1]
