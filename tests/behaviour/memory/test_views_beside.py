"""Graphs between breaks that hand on views, and compute beside them what the step does not differentiate."""

from types import SimpleNamespace

import pytest
import torch

from planner.verification.measure import measure_peak
from tests.side_by_side import Layers, assert_same, exact_plan_of, left_by, no_plan_warnings

pytestmark = pytest.mark.heavy


class _Unused(Layers):
    """What is computed beside the view is what the part behind it computes, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x)
        torch._dynamo.graph_break()
        z, unused = y.t(), y.sin()
        torch._dynamo.graph_break()
        self.shape = unused.shape
        return z.sin().square().mean()


class _Counted(Layers):
    """What is computed beside the view is looked at by an operation that ends the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x)
        torch._dynamo.graph_break()
        flat = y.flatten()
        positive = (y.exp() * 2).flatten().nonzero()  # all of them, whatever dropout leaves out
        return flat[positive[:, 0]].square().mean()


class _Repeated(Layers):
    """A part that runs in each of several iterations, of which the last result alone is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x)
        unused = y
        for _ in range(3):
            torch._dynamo.graph_break()
            y, unused = y.t(), y.cos()
        torch._dynamo.graph_break()
        return y.square().mean() + unused.detach().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("build", [_Unused, _Counted, _Repeated])
def test_the_step_follows_its_plan(build: type[Layers]) -> None:
    torch.manual_seed(0)
    model, twin = build(1), build(1)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(64, 32)
    plan = exact_plan_of(model, (x,), outputs="dropped")
    assert plan.views
    plan.apply(model)
    with no_plan_warnings():
        for size in (64, 64, 48, 40):
            given = x if size == 64 else torch.randn(size, 32)
            ours = left_by(model, lambda model, given=given: model(given).backward())
            assert_same(ours, left_by(twin, lambda model, given=given: model(given).backward()))
            model.zero_grad()
            twin.zero_grad()
        peak = measure_peak(lambda: model(x).backward(), "cpu").peak_bytes
    assert peak == plan.predicted.dynamic_peak_bytes


class _Adapted(torch.nn.Module):
    """What a frozen layer computes is differentiated where its input is: not in the first of several. Beside
    it a view is handed on, whose gradient goes to an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.adapter = torch.nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x * self.adapter
        torch._dynamo.graph_break()
        k, heads = self.frozen(x), q.view(-1, 8, 4)
        torch._dynamo.graph_break()
        return (heads.sin().flatten(1) * k.tanh()).relu()


class _ThreeAdapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _Adapted(), _Adapted(), _Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(x)
        x = self.third(x)
        return x.square().mean()


@pytest.mark.graphs
def test_a_graph_that_computes_in_other_layers_hands_on_views_alone_in_the_first() -> None:
    model, x = _ThreeAdapted(), torch.randn(64, 32)
    with no_plan_warnings():
        plan = exact_plan_of(model, (x,), outputs="dropped")
        assert plan.views
        plan.apply(model)
        for _ in range(3):
            model.zero_grad()
            model(x).backward()


class _Strides(Layers):
    """A graph takes a part of a tensor that an object beside the modules has, and what follows reads it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.strides = torch.tensor([8.0, 16.0, 32.0])
        self.anchors = SimpleNamespace(strides=self.strides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x)
        return y.square().mean() * self._scale(y, self.anchors.strides)

    def _scale(self, y: torch.Tensor, strides: torch.Tensor) -> torch.Tensor:
        scale = y.new_zeros(())
        for i in range(3):
            stride = strides[i]
            cells = torch.arange(4 * (3 - i)).type_as(y) + 0.5
            scale = scale + (y.new_full((len(cells),), stride) * cells).sum()  # type: ignore[arg-type]
        return scale


def test_a_part_of_what_was_there_before_is_not_made_by_the_graph() -> None:
    torch.manual_seed(0)
    model, x = _Strides(4), torch.randn(64, 32)
    plan = exact_plan_of(model, (x,), outputs="dropped")
    assert plan.predicted.dynamic_peak_bytes < plan.baseline.dynamic_peak_bytes
