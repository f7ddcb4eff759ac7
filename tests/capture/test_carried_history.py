"""Modules that go on from results of the forward before, which users set back, or detach, between steps."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner
from planner.capture.carried_history import CARRIED_HISTORY
from planner.verification.measure import measure_peak
from tests.side_by_side import no_plan_warnings

pytestmark = pytest.mark.heavy


class _Leaky(nn.Module):
    """A neuron that leaks: its potential goes on from the one before, in attributes of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.potential: torch.Tensor | None = None
        self.history: list[torch.Tensor] = []
        self.state = {"spikes": (None, 0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.potential is None else self.potential
        self.potential = torch.tanh(self.linear(x) + 0.9 * before)
        spikes = self.state["spikes"][0]
        self.state["spikes"] = (self.potential.sigmoid() + (0 if spikes is None else 0.5 * spikes), 1)
        self.history.append(self.potential)
        return self.state["spikes"][0] + sum(self.history)


class _Spiking(nn.Module):
    """Runs the neurons for some time, and nobody sets them back inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = _Leaky(), _Leaky(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.head(self.second(self.first(x))).square().mean() for _ in range(4))


def _set_back(model: _Spiking) -> None:
    for neuron in (model.first, model.second):
        neuron.potential, neuron.state["spikes"] = None, (None, 0)
        neuron.history.clear()


def _detached(model: _Spiking) -> None:
    for neuron in (model.first, model.second):
        neuron.potential = neuron.potential.detach()
        neuron.state["spikes"] = (neuron.state["spikes"][0].detach(), 1)
        neuron.history[:] = [neuron.potential]


def _trained(
    between: Callable[[_Spiking], None], *, plan_at: int | None = None
) -> tuple[_Spiking, planner.Plan | None]:
    torch.manual_seed(0)
    model, plan, inputs = _Spiking(), None, torch.randn(4, 8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n, x in enumerate(inputs):
        if n == plan_at:
            plan = planner.plan(model, x, budget="min")
            report = planner.verify(model, x, plan=plan)
            assert report.ok, report.problems
            plan.apply(model)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(model)
    return model, plan


def _same(ours: _Spiking, theirs: _Spiking) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in ((ours.first, theirs.first), (ours.second, theirs.second)):
        assert (a.potential is None) is (b.potential is None)
        assert a.potential is None or torch.equal(a.potential, b.potential)
        assert len(a.history) == len(b.history)


def test_neurons_that_are_set_back_between_steps_are_planned() -> None:
    with no_plan_warnings():
        model, plan = _trained(_set_back, plan_at=0)
    assert plan is not None
    assert plan.recomputed_operations
    assert CARRIED_HISTORY in plan.notes
    _same(model, _trained(_set_back)[0])
    x = torch.randn(8, 16)
    peak = measure_peak(lambda: model(x).backward(), "cpu").peak_bytes
    assert peak == plan.predicted.dynamic_peak_bytes


def test_neurons_that_are_detached_between_steps_are_planned_after_the_first() -> None:
    with no_plan_warnings():
        model, _ = _trained(_detached, plan_at=1)
    _same(model, _trained(_detached)[0])
    with pytest.warns(planner.PlanWarning, match="path that the plan has not seen"):
        model, _ = _trained(_detached, plan_at=0)
    _same(model, _trained(_detached)[0])


def test_what_is_kept_and_not_gone_on_from_stays() -> None:
    class Keeps(nn.Sequential):
        features: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.features = self[0](x)
            return self[1](self.features).square().mean()

    model, x = Keeps(nn.Linear(16, 64), nn.Linear(64, 4)), torch.randn(8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, x, budget="100%")
        report = planner.verify(model, x, plan=plan)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert CARRIED_HISTORY not in plan.notes
