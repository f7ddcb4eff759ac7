"""Floats that are computed from sizes, in the forward, at batches of any size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import planner
from tests.side_by_side import Layers, assert_same, counting_runs, left_by, no_plan_warnings

_BATCHES = (64, 48, 17, 33, 64, 60, 21, 9, 40, 50, 30)
"""More than one graph would be compiled for one by one."""


def _divided(model: Layers, x: torch.Tensor) -> dict[str, Any]:
    return {"loss": model.run(x).square().sum() / float(len(x))}


@pytest.mark.heavy
def test_floats_of_sizes_do_not_end_the_plan() -> None:
    def loop(run: Callable[..., dict[str, Any]]) -> Callable[[Layers], list[Any]]:
        def train(model: Layers) -> list[Any]:
            optimizer, returned = torch.optim.SGD(model.parameters(), 0.1), []
            generator = torch.Generator().manual_seed(3)
            for batch in _BATCHES:
                optimizer.zero_grad()
                returned.append(run(model, torch.randn(batch, 32, generator=generator)))
                returned[-1]["loss"].backward()
                optimizer.step()
            return returned

        return train

    def build() -> Layers:
        torch.manual_seed(0)
        return Layers(1)

    with no_plan_warnings(), counting_runs() as runs:
        planned = planner.step(_divided, budget="min", solver="sqrt_n")
        ours = left_by(build(), loop(planned))
    assert planned.plan.recomputed_operations
    assert runs.backward == len(_BATCHES)
    assert runs.captures == 2
    assert_same(ours, left_by(build(), loop(_divided)))
