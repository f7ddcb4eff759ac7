"""Several calls inside one region of autocast, where weights are cast once without a plan."""

import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch import autocast_state
from planner.runtime.shapes.policy import OnNewShape
from tests.side_by_side import no_plan_warnings


class Encoder(nn.Module):
    """Residual layers; each weight is used once in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


class Repeats(nn.Module):
    """A weight that is used twice in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Shared(nn.Module):
    """A layer that two graphs use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        return self.layer(x).float().square().mean()


Backward = Callable[[list[torch.Tensor]], None]


def _together(outputs: list[torch.Tensor]) -> None:
    pairs = itertools.pairwise([*outputs, outputs[0]])
    sum((a.float() * b.float()).square().mean() for a, b in pairs).backward()  # type: ignore[union-attr]


def _one_by_one(outputs: list[torch.Tensor]) -> None:
    for output in outputs:
        output.float().square().mean().backward()


def _last_only(outputs: list[torch.Tensor]) -> None:
    outputs[-1].float().square().mean().backward()


def _twice(outputs: list[torch.Tensor]) -> None:
    loss = sum(o.float().square().mean() for o in outputs)
    loss.backward(retain_graph=True)  # type: ignore[union-attr]
    loss.backward()  # type: ignore[union-attr]


def _gradients(model: nn.Module, calls: int, backward: Backward, kind: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 32, generator=generator) for _ in range(calls)]
    model.zero_grad()
    with torch.autocast("cpu", kind):
        outputs = [model(x) for x in inputs]
    backward(outputs)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def no_warning() -> Iterator[None]:
    with no_plan_warnings():
        yield


def _planned(model: nn.Module, kind: torch.dtype) -> planner.Plan:
    with torch.autocast("cpu", kind):
        return planner.plan(model, (torch.randn(16, 32),), budget="min", solver="sqrt_n")


@pytest.mark.heavy
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("kind", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.heavy)])
def test_gradients_of_calls_in_one_region_meet_as_without_a_plan(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Encoder()
    plan = _planned(model, kind)
    for calls, backward in itertools.product((1, 2, 4), (_together, _one_by_one, _last_only, _twice)):
        expected = _gradients(planner.remove(model), calls, backward, kind)
        found = _gradients(plan.apply(model), calls, backward, kind)
        assert all(map(torch.equal, expected, found)), (calls, backward)


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.usefixtures("no_warning")
def test_gradients_of_graphs_in_one_region_meet_as_without_a_plan() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
        report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert len(plan.graphs) == 2
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_what_cannot_be_distinguished_is_warned_of_once() -> None:
    torch.manual_seed(0)
    model = Repeats()
    plan = _planned(model, torch.bfloat16)
    plan.apply(model)
    with no_plan_warnings():
        _gradients(model, 1, _together, torch.bfloat16)
        _gradients(model, 1, _together, torch.bfloat16)  # another region
    with pytest.warns(planner.PlanWarning, match="again inside one region of autocast"):
        _gradients(model, 2, _together, torch.bfloat16)
    with no_plan_warnings():
        _gradients(model, 3, _together, torch.bfloat16)  # warned of once


@pytest.mark.parametrize("planned_first", [True, False])
def test_a_call_in_evaluation_mode_in_the_same_region_is_warned_of(planned_first: bool) -> None:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(16, 32)
    _planned(model, torch.bfloat16).apply(model)

    def backward(training: bool, then: bool) -> None:
        _together([model.train(training)(x), model.train(then)(x)])

    with no_plan_warnings():
        warnings.filterwarnings("ignore", "the plan is for training mode", planner.PlanWarning)
        for training in (planned_first, not planned_first):
            with torch.autocast("cpu", torch.bfloat16):  # each in its own region
                model.train(training)(x).float().square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            backward(False, False)
    for count in (1, 0):  # warned of once
        with warnings.catch_warnings(record=True) as reported, torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("always")
            backward(planned_first, not planned_first)
        assert sum("again inside one region of autocast" in str(w.message) for w in reported) == count


@pytest.mark.parametrize("planned_with", [True, False])
def test_autocast_that_keeps_no_casts(planned_with: bool) -> None:
    torch.manual_seed(0)
    model, x = Repeats(), torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=planned_with):
        plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            output = model(x)
        output.float().square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    plan.apply(model)
    assert all(map(torch.equal, expected, gradients()))


class SwitchesOff(Repeats):
    """Keeps no casts in a part of its own region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.tanh(self.layer(self.layer(x)))
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return self.layer(torch.tanh(self.layer(x))).float().square().mean()


@pytest.mark.heavy
def test_autocast_that_keeps_no_casts_in_a_part() -> None:
    torch.manual_seed(0)
    model, x = SwitchesOff(), torch.randn(16, 32)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.parametrize("policy", [pytest.param("replan", marks=pytest.mark.heavy), "reapply"])
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_calls_of_other_sizes_that_are_planned_between_meet_as_without_a_plan(
    policy: OnNewShape,
) -> None:
    def gradients(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Encoder().train()
        if planned:
            planner.auto_checkpoint(
                model, budget="min", solver="sqrt_n", loss=lambda y: y.sum(), on_new_shape=policy
            )
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [model(torch.randn(rows, 32)) for rows in (8, 12, 20)]
        _together([output[:8] for output in outputs])
        return [p.grad for p in model.parameters() if p.grad is not None]

    for expected, found in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(expected, found)


class Scaled(nn.Module):
    """Takes most after the gradient of its output has been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x * 0.5 + (x - x.mean(-1, keepdim=True))))


def test_steps_that_are_verified_are_in_regions_of_their_own() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        plan = planner.plan(model, (x,), loss=torch.mean, budget="min", outputs="dropped", solver="sqrt_n")
        report = planner.verify(model, (x,), loss=torch.mean, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_what_autocast_keeps_is_asked_for_in_single_precision() -> None:
    """It is asked once for all, by a parameter: of another type, none of it would be kept."""
    autocast_state._empty_parameter.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert autocast_state.notes_of_region("cpu") is None  # nothing has a history there
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_state.notes_of_region("cpu") is not None
