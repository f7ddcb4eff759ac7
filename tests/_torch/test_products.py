"""Products of elements, whose backward eager chooses by the data."""

import pytest
import torch
from torch import Tensor, nn

import planner


class Product(nn.Module):
    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.layer, self.detached = nn.Linear(8, 8), detached

    def forward(self, x: Tensor) -> Tensor:
        factors = self.layer(x)
        product = (factors.detach() if self.detached else factors).prod(1)
        return (product[:, None] * factors).square().mean()


@pytest.mark.graphs
def test_the_gradient_of_a_product_is_warned_of() -> None:
    with pytest.warns(planner.PlanWarning, match=r"torch\.prod"):
        plan = planner.plan(Product(detached=False), args=(torch.randn(16, 8),), budget="150%")
    assert any("torch.prod" in note for note in plan.notes)


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_a_product_without_a_gradient_is_not() -> None:
    planner.plan(Product(detached=True), args=(torch.randn(16, 8),), budget="150%")
