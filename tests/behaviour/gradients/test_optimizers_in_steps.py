"""Steps that look into an optimizer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import planner
from tests.side_by_side import assert_same, layers, left_by, no_plan_warnings


def _by_the_rate(model: Any, x: torch.Tensor) -> torch.Tensor:
    rate = model.trainer.optimizers[0].param_groups[0]["lr"]
    loss: torch.Tensor = model(x) * (1 + rate)
    return loss


@pytest.mark.heavy
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_reads_the_learning_rate_is_planned(compiled: bool) -> None:
    """Where ``torch.compile`` is around ``optimizer.step`` too, which marks the parameters."""

    def train(step: Any, model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        model.trainer = SimpleNamespace(optimizers=[optimizer])
        losses = []
        for size in (64, 48, 32):
            loss = step(model, torch.ones(size, 32))
            loss.backward()
            update()
            optimizer.zero_grad()
            losses.append(loss.item())
        del model.trainer
        return losses

    (model, _, _), (twin, _, _) = layers(), layers()
    planned = planner.step(_by_the_rate, budget="min", solver="sqrt_n", costs="roofline")
    with no_plan_warnings():
        ours = left_by(model, lambda model: train(planned, model))
    assert_same(ours, left_by(twin, lambda model: train(_by_the_rate, model)))
    torch.compiler.reset()
