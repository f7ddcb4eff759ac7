"""Numbers that a forward reads from its data, and only compares: their value may differ at each step."""

import copy
import math
import random
from collections.abc import Callable

import pytest
import torch

from tests.side_by_side import (
    Layers,
    assert_same,
    layers,
    left_by,
    no_plan_warnings,
    peak_of,
    plan_of,
    steps,
)

pytestmark = pytest.mark.heavy


class Halves(Layers):
    """Makes what grows too large smaller."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.detach().abs().max().item() > 100:
                x = x / 2
        return x


class LooksFirst(Layers):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        largest = float(x.detach().abs().max())
        if not math.isfinite(largest):
            x = x.nan_to_num()
        return super().run(x)


class Draws(Layers):
    """Adds noise or none, as a number of Python's decides."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        drawn = random.random()
        return super().run(x + 1 if drawn < 2 else x)


@pytest.mark.parametrize("build", [Halves, LooksFirst, pytest.param(Draws, marks=pytest.mark.heavy)])
def test_what_is_only_compared_may_differ_at_each_step(build: Callable[[], Layers]) -> None:
    model, (x,), _ = layers(build)
    twin = copy.deepcopy(model)
    plan = plan_of(model, (x,))
    plan.apply(model)
    with no_plan_warnings():
        for count in (2, 4):
            assert_same(left_by(model, steps((x,), count)), left_by(twin, steps((x,), count)))
    assert peak_of(model, (x,)) == plan.predicted.dynamic_peak_bytes
