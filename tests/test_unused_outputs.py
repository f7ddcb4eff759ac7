"""Outputs of a graph that the loss does not use, and what users may do with them."""

import copy

import torch
from torch import nn

import planner
from tests.side_by_side import no_plan_warnings


class Scored(nn.Module):
    """Hands out scores beside what the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        return self.second(hidden).tanh(), hidden.sum(1)


def test_an_output_that_the_loss_does_not_use_is_written_to_in_place() -> None:
    torch.manual_seed(0)
    model, x = Scored(), torch.randn(8, 16)
    twin = copy.deepcopy(model)

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return output[0].square().sum()

    planner.plan(model, (x,), budget="min", loss=loss, solver="sqrt_n").apply(model)
    for _ in range(2):
        with no_plan_warnings():
            ours = model(x)
            ours[1].div_(2)
            loss(ours).backward()
        theirs = twin(x)
        theirs[1].div_(2)
        loss(theirs).backward()
        assert torch.equal(ours[1], theirs[1])
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
