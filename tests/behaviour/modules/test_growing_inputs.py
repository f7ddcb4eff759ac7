"""Inputs that grow all through a training run are not planned for again and again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import planner
from planner._torch import modules
from planner.runtime.install import PlannedCall
from planner.runtime.shapes import policy as shape_policy
from planner.runtime.shapes.policy import Program
from planner.verification.measure import measure_peak
from tests.side_by_side import assert_same, layers, left_by, no_plan_warnings

SIZES = range(64, 417, 32)


def _loop(seen: Callable[[Any, int], None]) -> Callable[[Any], list[float]]:
    def loop(model: Any) -> list[float]:
        losses = []
        for size in SIZES:
            x = torch.randn(size, 32, generator=torch.Generator().manual_seed(size))
            loss = model(x)
            loss.backward()
            losses.append(loss.item())
            model.zero_grad()
            seen(model, size)
        return losses

    return loop


def _programs(model: Any) -> list[Program]:
    call = modules.installed_call(model)
    assert isinstance(call, PlannedCall)
    return call._shapes._programs


@pytest.mark.heavy
def test_growing_inputs_get_a_few_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_policy, "MOST_PLANS", 4)
    (model, _, _), (twin, _, _) = layers(), layers()
    planner.auto_checkpoint(model, budget="900KiB", solver="sqrt_n", costs="roofline")
    counts = []
    with no_plan_warnings():
        ours = left_by(model, _loop(lambda model, _: counts.append(len(_programs(model)))))
    assert_same(ours, left_by(twin, _loop(lambda *_: None)))
    assert counts[-1] == 4
    _, *again = capsys.readouterr().err.splitlines()
    assert len(again) == 3
    assert all("Layers planned again for larger inputs (x is " in line for line in again)
    assert [line.endswith("Plan for the largest inputs at first") for line in again] == [False, False, True]


@pytest.mark.heavy
def test_a_least_plan_runs_what_takes_a_little_more_than_it() -> None:
    model = layers()[0]
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n", costs="roofline")

    def step(size: int) -> Callable[[], torch.Tensor]:
        x = torch.ones(size, 32)

        def run() -> torch.Tensor:
            model.zero_grad()
            loss: torch.Tensor = model(x)
            loss.backward()
            return loss

        return run

    step(256)()
    least = _programs(model)[0].plan.predicted.dynamic_peak_bytes
    for size, plans in ((264, 1), (400, 2), (404, 2), (300, 2)):
        step(size)()
        assert len(_programs(model)) == plans
        model.zero_grad()
        within = measure_peak(step(size), "cpu").peak_bytes <= shape_policy.MORE_THAN_LEAST * least
        assert within is (size == 264)
