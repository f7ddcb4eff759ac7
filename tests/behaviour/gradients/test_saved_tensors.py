"""Hooks on saved tensors that a forward sets around a part of itself: that part runs as it is written."""

from typing import Any

import pytest
from torch import Tensor
from torch.autograd import graph

import planner
from tests.side_by_side import Layers, assert_trains_alike, layers, plan_of, steps


def _narrow(tensor: Tensor) -> Any:
    return tensor.half() if tensor.is_floating_point() else tensor


def _wide(packed: Any) -> Tensor:
    return packed.float() if packed.is_floating_point() else packed  # type: ignore[no-any-return]


class Narrowed(Layers):
    """What one of its layers saves is kept in half precision; the others are of the same code."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == 1:
                with graph.saved_tensors_hooks(_narrow, _wide):
                    x = x + layer(x)
            else:
                x = x + layer(x)
        return x.square().mean()


class FirstNarrowed(Narrowed):
    """The layer that Dynamo comes to first."""

    def forward(self, x: Tensor) -> Tensor:
        with graph.saved_tensors_hooks(_narrow, _wide):
            x = self.layers[0](x)
        return self.run(x).square().mean()


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize("build", [Narrowed, FirstNarrowed])
def test_hooks_that_change_what_is_saved(build: type[Layers]) -> None:
    model, args, _ = layers(build)
    plan = plan_of(model, args)
    assert plan.coverage == "partly-captured"
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert_trains_alike(model, args, steps(args), expected_runs=None)
