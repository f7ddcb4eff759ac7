"""A forward that handles errors of PyTorch's goes the way that it goes without a plan."""

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import CaptureError, PlanWarning
from tests.residual_block import Block
from tests.side_by_side import assert_same, left_by, plan_of, steps

pytestmark = pytest.mark.heavy


def solved(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(a, a)


def by_function(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    try:
        return solved(a)
    except RuntimeError:
        return other(a)


def by_method(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    try:
        with contextlib.nullcontext():
            return a.inverse()
    except (ValueError, torch.linalg.LinAlgError) as error:
        return other(a) * len(str(error))


def whatever_it_is(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    try:
        return torch.linalg.solve(a, a)
    except:  # noqa: E722
        return other(a)


def no_such_row(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    try:
        return a[99]
    except IndexError:
        return other(a)


def no_such_dimension(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    try:
        return a.sum(5)
    except IndexError:
        return other(a)


def other_sizes(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    try:
        return torch.mm(a, a[:3])
    except RuntimeError:
        return other(a)


Handled = Callable[[torch.Tensor, nn.Module], torch.Tensor]


class Handles(nn.Module):
    def __init__(self, handled: Handled) -> None:
        super().__init__()
        self.blocks, self.other = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 16)
        self.handled = handled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.handled(x, self.other).square().mean()


@pytest.mark.parametrize("handled", [by_function, by_method, whatever_it_is])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_an_error_that_depends_on_data(handled: Handled, scale: float) -> None:
    """It is the forward's, and not the graph's, whichever data come."""
    torch.manual_seed(0)
    model = Handles(handled)
    for block in model.blocks:
        nn.init.zeros_(block.second.bias)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(block.second.weight)  # type: ignore[union-attr, arg-type]
    twin, x = copy.deepcopy(model), torch.eye(16)
    plan_of(model, (x,)).apply(model)
    x = x * scale  # has no inverse where it is zero
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # the way that the plan has not seen
        ours = left_by(model, steps((x,), lr=0.0))
    assert_same(ours, left_by(twin, steps((x,), lr=0.0)))


def in_inference_mode(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        scale = a.view(-1).sin()
    return other(a) * scale.clone().view_as(a)


@pytest.mark.parametrize(
    ("handled", "name"),
    [(by_function, "linalg_solve"), (by_method, "inverse"), (in_inference_mode, "inference_mode")],
)
def test_a_graph_of_it_is_refused(handled: Handled, name: str) -> None:
    with pytest.raises(CaptureError, match=rf"calls {name}\(\), which graphs leave to replays"):
        plan_of(Handles(handled), (torch.eye(16),), backend="graph")


def test_a_graph_of_two_branches_is_not() -> None:
    """``torch.cond`` has the name of the condition number of a matrix."""

    def branches(a: torch.Tensor, other: nn.Module) -> torch.Tensor:
        return torch.cond(a.sum() > 0, lambda b: b.sin(), lambda b: b.cos(), (other(a),))

    assert plan_of(Handles(branches), (torch.eye(16),), backend="graph").graphs


@pytest.mark.parametrize("handled", [no_such_row, no_such_dimension, other_sizes])
def test_an_error_that_depends_on_sizes(handled: Handled, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Handles(handled), torch.randn(20, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        plan = planner.plan(model, (x,), budget="min")
        report = planner.verify(model, (x,), plan=plan, repeats=1)
    assert not report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert not caplog.records


@pytest.mark.graphs
def test_a_planned_step_that_comes_to_it_later_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Handles(lambda a, other: other(a)), torch.zeros(16, 16)
    plan_of(model, (x,)).apply(model)
    twin = copy.deepcopy(model)
    planner.remove(twin)
    for each in (model, twin):
        each.handled = by_function  # type: ignore[assignment]
    with pytest.warns(PlanWarning, match="without the plan"):
        ours = left_by(model, steps((x,), lr=0.0))
    assert_same(ours, left_by(twin, steps((x,), lr=0.0)))
