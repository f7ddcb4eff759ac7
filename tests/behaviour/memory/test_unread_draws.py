"""Random numbers that a forward draws and does not use are drawn all the same: later ones depend on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint

import planner


class Drawing(nn.Module):
    """Does something whose result is not used, and then dropout."""

    def __init__(self, unread: "Callable[[Drawing, torch.Tensor], object]") -> None:
        super().__init__()
        self.unread, self.layers = unread, nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unread(self, x)
        for layer in self.layers:
            x = x + functional.dropout(layer(x).relu(), 0.2)
        return x.square().mean()


def without_gradients(_model: Drawing, x: torch.Tensor) -> None:
    with torch.no_grad():
        functional.dropout(x, 0.3)


def ended_by_an_error(_model: Drawing, x: torch.Tensor) -> None:
    try:
        functional.dropout(x, 0.3)
        raise ValueError
    except ValueError:
        pass


UNREAD: dict[str, Callable[[Drawing, torch.Tensor], object]] = {
    "dropout": lambda _, x: functional.dropout(x, 0.3),
    "an error after dropout": ended_by_an_error,
    "a layer": lambda model, x: functional.dropout(model.layers[0](x), 0.3) * 2,
    "no_grad": without_gradients,
    "attention": lambda model, x: model.attention(x, x, x),
    "rrelu": lambda _, x: functional.rrelu(x, training=True),
    "in place": lambda _, x: torch.empty_like(x).bernoulli_(0.3),
    "a checkpoint": lambda _, x: checkpoint(functional.dropout, x, 0.3, use_reentrant=False),
    "numbers": lambda _, x: torch.rand(3),
    "indices": lambda _, x: torch.multinomial(x.softmax(-1), 1),
}
FAST = ("dropout", "an error after dropout", "no_grad", "attention")


def follows(unread: Callable[[Drawing, torch.Tensor], object], **options: Any) -> list[str]:
    """What of a planned step differs from the unplanned one."""
    model, x = Drawing(unread), torch.randn(8, 16)
    plan = planner.plan(model, x, budget="min", **options)
    return list(planner.verify(model, x, plan=plan, repeats=0).problems)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "kind", [name if name in FAST else pytest.param(name, marks=pytest.mark.heavy) for name in UNREAD]
)
def test_what_is_drawn_and_not_used_is_drawn(kind: str) -> None:
    assert follows(UNREAD[kind], costs="roofline") == []


@pytest.mark.heavy
def test_what_is_drawn_and_not_used_is_drawn_under_inductor() -> None:
    assert follows(UNREAD["attention"], backend="inductor") == []
