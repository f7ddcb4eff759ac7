"""Dropout under Inductor: the backward has the masks of the forward."""

import pytest
import torch
import torch.nn as nn

import planner
from tests.zoo import GPT

SEED = 3


def loss_at(model: nn.Module, inputs: tuple[torch.Tensor, ...], change: float) -> torch.Tensor:
    """The loss of a step with its own masks, all parameters changed in one direction by so much."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(direction, alpha=change)
    torch.manual_seed(SEED)
    loss: torch.Tensor = model(*inputs)
    return loss


@pytest.mark.heavy
def test_gradients_are_differences_of_losses_with_the_same_masks() -> None:
    torch.manual_seed(0)
    words = torch.randint(0, 50, (2, 2, 16))
    model = GPT(words=50, width=32, heads=2, layers=1, context=16, dropout=0.3).double().train()
    inputs = (words[0], words[1])
    plan = planner.plan(model, inputs, budget="min", backend="inductor")
    assert plan.recomputed_operations
    planned = plan.apply(model)
    loss_at(planned, inputs, 0.0).backward()
    generator = torch.Generator().manual_seed(SEED)
    along = sum(
        float((p.grad * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum())
        for p in model.parameters()
        if p.grad is not None
    )
    planned.zero_grad(set_to_none=True)
    step = 1e-5
    above = loss_at(planned, inputs, step).item()
    below = loss_at(planned, inputs, -2 * step).item()
    assert (above - below) / (2 * step) == pytest.approx(along, rel=1e-5)
