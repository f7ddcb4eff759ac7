"""Results that are changed in place before their backward: no plan keeps them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import plan_of

_HANDED_OUT: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "itself": lambda h: (h,),
    "view": lambda h: (h.view(-1, 32, 64),),
    "transposed": lambda h: (h.transpose(0, 1),),
    "two views": lambda h: (h.view(-1, 32, 64), h.transpose(0, 1)),
    "itself and a view": lambda h: (h, h.view(-1, 32, 64)),
}


class Handed(nn.Module):
    """Hands on what sums are made of, which cost little to make again; eager keeps the sums alone."""

    def __init__(self, view: str = "itself", *, in_place: bool = True) -> None:
        super().__init__()
        self.widen, self.view, self.in_place = nn.Linear(256, 64), _HANDED_OUT[view], in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(x)
        total = torch.zeros(())
        for i in range(6):
            total = total + (hidden + float(i)).sin().mean()
        handed_out = self.view(hidden)
        torch._dynamo.graph_break()
        y = handed_out[0]
        if self.in_place:
            y -= torch.ones(1)
        else:
            y = y - torch.ones(1)
        return total + sum(each.sum() * 0.1 for each in (y, *handed_out[1:]))


class Sums(nn.Module):
    """Returns what sums are made of, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.widen(x)
        total = torch.zeros(())
        for i in range(6):
            total = total + (hidden + float(i)).sin().mean()
        return hidden, total


def _step() -> tuple[torch.Tensor]:
    return (torch.randn(1024, 256),)


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize("view", [*_HANDED_OUT])
def test_results_that_are_changed_in_place_are_not_kept(view: str) -> None:
    torch.manual_seed(0)
    model, args = Handed(view).train(), _step()
    free = plan_of(Handed(view, in_place=False), args, budget="85%")
    assert 0 in free.graphs[0].kept
    plan = plan_of(model, args, budget="85%")
    assert 0 in plan.graphs[0].recomputed
    if view == "itself and a view":  # AOTAutograd traces the second graph otherwise when it trains
        with pytest.warns(planner.PlanWarning, match="traces this model into other operations"):
            report = planner.verify(model, args, plan=plan, repeats=0)
    else:
        report = planner.verify(model, args, plan=plan, repeats=0)
        assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.gradients_equal
    assert report.rng_equal


def test_a_loop_that_changes_a_kept_result_in_place_is_an_error() -> None:
    torch.manual_seed(0)
    model, args = Sums().train(), _step()
    plan = plan_of(model, args, loss=lambda results: results[0].sum() + results[1], budget="85%")
    assert 0 in plan.graphs[0].kept
    hidden, total = plan.apply(model)(*args)
    hidden -= 1.0
    with pytest.raises(planner.InputsChanged, match=r"a result of a part .* keeps it"):
        (hidden.sum() + total).backward()
    planned = plan_of(model, args, loss=lambda results: results[0].sub_(1.0).sum() + results[1], budget="85%")
    hidden, total = planned.apply(model)(*args)
    hidden -= 1.0
    (hidden.sum() + total).backward()


@pytest.mark.graphs
def test_keeping_a_result_that_is_changed_in_place_is_refused() -> None:
    model, args = Handed().train(), _step()
    with pytest.raises(planner.PlannerError, match=r"addmm.* in widen .* changes it in place .* keep="):
        plan_of(model, args, keep=["widen"])
