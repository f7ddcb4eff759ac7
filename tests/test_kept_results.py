"""Results that a plan keeps for its backward, and that are changed in place before it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda h: h,
    "view": lambda h: h.view(-1, 32, 64),
    "transposed": lambda h: h.transpose(0, 1),
}


class Handed(nn.Module):
    """Hands on what sums are made of, which cost little to make again; eager keeps the sums alone."""

    def __init__(self, view: str, *, in_place: bool) -> None:
        super().__init__()
        self.widen, self.view, self.in_place = nn.Linear(256, 64), _VIEWS[view], in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(x)
        total = torch.zeros(())
        for i in range(6):
            total = total + (hidden + float(i)).sin().mean()
        y = self.view(hidden)
        torch._dynamo.graph_break()
        if self.in_place:
            y -= torch.ones(1)
        else:
            y = y - torch.ones(1)
        return y.sum() * 0.1 + total


@pytest.mark.parametrize("view", [*_VIEWS])
def test_kept_results_that_are_changed_in_place_are_an_error(view: str) -> None:
    torch.manual_seed(0)
    model, x = Handed(view, in_place=True).train(), torch.randn(1024, 256)
    twin = copy.deepcopy(model)
    plan = planner.plan(model, (x,), budget="85%")
    assert plan.graphs[0].recomputed
    assert 0 in plan.graphs[0].kept
    loss = plan.apply(model)(x)
    with pytest.raises(planner.InputsChanged, match=r"a result of a part .* keeps it"):
        loss.backward()
    model.in_place = twin.in_place = False
    for each in (model, twin):
        each.zero_grad()
        each(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
