"""A training step does not end in an error of the planner's own: it runs without the plan, and says so."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.costs import workspace
from planner.errors import CaptureError, PlanMismatch, PlanWarning
from planner.runtime import install, read_again
from planner.runtime.shapes import policy as shape_policy
from tests.side_by_side import (
    Layers,
    assert_same,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
    steps,
)

pytestmark = pytest.mark.heavy


class Small(Layers):
    def __init__(self) -> None:
        super().__init__(2)


CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def _nothing_measured_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workspace, "default_cache_path", lambda: tmp_path / "workspace.json")


# ---- an open profiler ---------------------------------------------------------------------------------


def test_planning_inside_a_profiler_says_what_it_did_not_measure() -> None:
    model, args, _ = layers(Small)
    with torch.profiler.profile(activities=CPU), pytest.warns(PlanWarning, match="profiler session was open"):
        inside = plan_of(model, args)
    outside = plan_of(model, args)
    assert any("could not be measured" in note for note in inside.notes)
    assert not any("could not be measured" in note for note in outside.notes)


def test_a_larger_shape_inside_a_profiler_trains_on() -> None:
    model, args, _ = layers(Small)
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)
    model(*args).backward()
    larger = (torch.randn(96, 32),)
    with torch.profiler.profile(activities=CPU), pytest.warns(PlanWarning, match="profiler session was open"):
        ours = left_by(model, steps(larger))
    assert_same(ours, left_by(twin, steps(larger)))


# ---- errors of our own, and of PyTorch's front end ----------------------------------------------------


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the books are lost")


@pytest.mark.parametrize(
    ("where", "name", "rows"),
    [(shape_policy, "input_records", 96), (shape_policy, "prepare", 96), (read_again, "partition", 64)],
    ids=["shapes", "prediction", "graphs"],
)
def test_a_step_outlives_an_error_of_the_planners(
    where: Any, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, _ = layers(Small)
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)
    monkeypatch.setattr(where, name, _broken)
    with pytest.warns(PlanWarning, match="the books are lost") as caught:
        ours = left_by(model, steps((torch.ones(rows, 32),)))
    assert len([w for w in caught if w.category is PlanWarning]) == 1
    assert_same(ours, left_by(twin, steps((torch.ones(rows, 32),))))


@pytest.mark.graphs
def test_a_step_outlives_an_error_at_one_more_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = layers(Small)
    twin = copy.deepcopy(model)
    planner.plan(model, args, budget="min", solver="sqrt_n", backend="graph").apply(model)
    model(*args).backward()
    model.zero_grad()
    monkeypatch.setattr(read_again, "partition", _broken)
    with pytest.warns(PlanWarning, match="a part of the forward runs without the plan.*the books are lost"):
        ours = left_by(model, steps((torch.ones(48, 32),)))
    assert_same(ours, left_by(twin, steps((torch.ones(48, 32),))))


def _never_traced() -> None:
    """Dynamo raises where it comes here."""


_never_traced._dynamo_forbidden = True  # type: ignore[attr-defined]


class TurnsForbidden(Small):
    forbidden = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forbidden:
            _never_traced()
        return super().forward(x)


@pytest.mark.graphs
def test_a_step_outlives_an_error_of_dynamos(caplog: pytest.LogCaptureFixture) -> None:
    model, args, _ = layers(TurnsForbidden)
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)
    for each in (model, twin):
        each.forbidden = True  # type: ignore[assignment]
    told = r"forbidden callable.*test_own_errors\.py:\d+ \(_never_traced\(\)\)\. Plan with backend='replay'"
    with pytest.warns(PlanWarning, match=told):
        ours = left_by(model, steps(args))
    shown = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert shown
    assert not any(record.exc_info for record in shown)  # no traceback of ours or Dynamo's
    assert_same(ours, left_by(twin, steps(args)))
    model.forbidden = False  # type: ignore[assignment]
    with no_plan_warnings():
        model(*args).backward()


def test_what_is_meant_to_be_an_error_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = layers(Small)
    plan = plan_of(model, args)
    plan.apply(model, on_new_shape="error")
    with pytest.raises(PlanMismatch, match="on_new_shape='error'"):
        model(torch.randn(96, 32))
    plan.apply(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(96, 31))
    monkeypatch.setattr(read_again, "partition", _broken)
    plan.apply(model)
    with no_plan_warnings(), pytest.raises(Exception, match="the books are lost"):
        model(*args)


# ---- gradients only where nothing can be captured -----------------------------------------------------


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class OnlyOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Doubles.apply(x * self.weight)  # type: ignore[no-untyped-call]
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x.relu() + 1)


@pytest.mark.graphs
def test_gradients_only_outside_of_graphs_are_an_error_that_names_the_line() -> None:
    with pytest.raises(
        CaptureError, match=r"test_own_errors\.py:\d+ \(return self\.hidden.*Plan it with backend='replay'"
    ):
        planner.plan(OnlyOutside(), (torch.ones(4, 8),), budget="min")


# ---- classes of scripts -------------------------------------------------------------------------------


def test_a_script_applies_the_plan_that_was_made_where_it_is_imported() -> None:
    args = (torch.ones(8, 32),)
    of_script = type("Net", (Layers,), {"__module__": "__mp_main__"})
    model: nn.Module = of_script(1)
    plan = plan_of(type("Net", (Layers,), {"__module__": "__main__"})(1), args)
    assert install.installed_plan(plan.apply(model)) is plan
    other = type("Nets", (Layers,), {"__module__": "__main__"})
    with pytest.raises(PlanMismatch, match="Nets"):
        plan.apply(other(1))


class Centred(nn.Module):
    """Takes a number that is a buffer of double precision from what a graph break hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("centre", torch.tensor(1.8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        if x.sum() > 1e9:
            x = x * 2
        return (x - self.centre).square().mean()


@pytest.mark.graphs
def test_dynamo_captures_again_where_tracing_asks_for_it() -> None:
    torch.manual_seed(0)
    model, x = Centred(), torch.randn(8, 16)
    plan_of(model, (x,)).apply(model)
    with no_plan_warnings(), counting_runs() as runs:
        model(x).backward()
    assert runs.backward == 2
