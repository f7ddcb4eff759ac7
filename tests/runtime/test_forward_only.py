"""Graphs behind a graph break of which the step differentiates nothing run as they are, without a warning."""

import itertools

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import planner
from planner.verification.measure import measure_peak
from tests.side_by_side import Layers, assert_same, left_by, no_plan_warnings, plan_of


class WithFeatures(nn.Module):
    """Hands out, besides its loss, what code behind a graph break makes, as Accelerate casts outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers(2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body.run(x)
        loss = y.square().mean()
        torch._dynamo.graph_break()
        return {"loss": loss, "features": y.double()}


def _train(model: nn.Module) -> None:
    for size in (64, 32, 48):
        model(torch.ones(size, 32))["loss"].backward()
        model.zero_grad()


@pytest.mark.graphs
@pytest.mark.heavy
def test_they_run_as_they_are() -> None:
    torch.manual_seed(0)
    model, twin = WithFeatures(), WithFeatures()
    twin.load_state_dict(model.state_dict())
    x = torch.ones(64, 32)
    plan = plan_of(model, (x,), outputs="dropped")
    assert len(plan.forward_only) == 1
    plan.apply(model)
    with no_plan_warnings():
        ours = left_by(model, _train)
    assert_same(ours, left_by(twin, _train))
    peak = measure_peak(lambda: model(x)["loss"].backward(), "cpu").peak_bytes
    assert peak == pytest.approx(plan.predicted.dynamic_peak_bytes, rel=0.005)
    model.zero_grad()
    with (
        pytest.warns(planner.PlanWarning, match="uses outputs that the planned step leaves unused"),
        pytest.raises(planner.PlanMismatch, match="did not use"),
    ):
        model(x)["features"].sum().backward()


class _CutBetween(Layers):
    """A view between two graph breaks: a graph that AOTAutograd leaves to its input, as gradients pass by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x)
        torch._dynamo.graph_break()
        y = y[:-1].reshape(-1, 32)
        torch._dynamo.graph_break()
        return y.square().mean()


@pytest.mark.heavy
def test_a_view_that_passes_gradients_on_is_none_of_them() -> None:
    torch.manual_seed(0)
    model, twin = _CutBetween(1), _CutBetween(1)
    twin.load_state_dict(model.state_dict())
    x = torch.ones(64, 32)
    plan = plan_of(model, (x,), outputs="dropped")
    assert not plan.forward_only
    plan.apply(model)
    with no_plan_warnings():
        ours = left_by(model, lambda model: model(x).backward())
    assert_same(ours, left_by(twin, lambda model: model(x).backward()))
    model.zero_grad()
    peak = measure_peak(lambda: model(x).backward(), "cpu").peak_bytes
    assert peak == pytest.approx(plan.predicted.dynamic_peak_bytes, rel=0.005)


class _FrozenBefore(nn.Module):
    """What frozen parts make is handed on behind graph breaks; the second writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128).requires_grad_(False)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(128, 128)).requires_grad_(False)
        self.head = nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        y = self.second(y)
        torch._dynamo.graph_break()
        return self.head(y).square().mean()


@pytest.mark.graphs
def test_what_they_allocate_inside_counts() -> None:
    torch.manual_seed(0)
    model, x = _FrozenBefore(), torch.ones(64, 32)
    plan = plan_of(model, (x,))
    assert len(plan.forward_only) == 2
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert plan.predicted.dynamic_peak_bytes >= 2 * 64 * 128 * 4


class CastsTwice(nn.Module):
    """Two parts use the same weights, the first for nothing that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.norm = nn.Sequential(nn.Linear(64, 64), nn.SiLU()), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        checkpoint(self.part, x * 2, use_reentrant=False)
        self.norm(x)
        torch._dynamo.graph_break()
        x = x + x.repeat(64, 1).tanh().mean()
        y: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return y


def test_casts_that_autocast_keeps_of_them_count() -> None:
    torch.manual_seed(0)
    model, x = CastsTwice(), torch.randn(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_of(model, (x,), loss=torch.mean, budget="100%")
        report = planner.verify(model, (x,), loss=torch.mean, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class _Block(nn.Module):
    """Two graphs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        result: torch.Tensor = self.second(torch.tanh(torch.sigmoid(x) * x))
        return result


class _Codec(nn.Module):
    """An encoder that gets no gradients, and a decoder of the same code; the encoding is kept or dropped."""

    def __init__(self, sizes: list[int], kept: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(_Block(*pair) for pair in itertools.pairwise(sizes))
        self.decoder = nn.ModuleList(_Block(*pair) for pair in itertools.pairwise([32, 32, 64, 32]))
        self.kept = kept

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        for block in self.encoder:
            x = block(x)
        y, codes = x.detach(), x if self.kept else None
        del x
        for block in self.decoder:
            y = block(y)
        return y, codes


@pytest.mark.heavy
@pytest.mark.parametrize(("sizes", "kept"), [([32, 32, 64, 32], True), ([32, 64, 128, 32], False)])
def test_an_encoder_without_gradients_whose_code_the_decoder_runs_too(sizes: list[int], kept: bool) -> None:
    torch.manual_seed(0)
    model, x = _Codec(sizes, kept).train(), torch.randn(64, 32)

    def loss(output: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        return output[0].square().mean()

    plan = plan_of(model, (x,), loss=loss)
    with no_plan_warnings():
        report = planner.verify(model, (x,), plan=plan, loss=loss, repeats=0)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
        plan.apply(model)
        loss(model(x)).backward()

        def step() -> None:
            model(x)  # as a step that is skipped

        assert measure_peak(step, "cpu").final_bytes == 0
