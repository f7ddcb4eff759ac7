"""Outputs of a graph that the loss does not use, and what users may do with them."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.graph.tangent_layouts import TangentLayouts
from tests.side_by_side import assert_same, left_by, no_plan_warnings, plan_of

pytestmark = pytest.mark.heavy


class Scored(nn.Module):
    """Hands out scores beside what the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        return self.second(hidden).tanh(), hidden.sum(1)


def test_an_output_that_the_loss_does_not_use_is_written_to_in_place() -> None:
    torch.manual_seed(0)
    model, x = Scored(), torch.randn(8, 16)
    twin = copy.deepcopy(model)

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return output[0].square().sum()

    planner.plan(model, (x,), budget="min", loss=loss, solver="sqrt_n").apply(model)
    for _ in range(2):
        with no_plan_warnings():
            ours = model(x)
            ours[1].div_(2)
            loss(ours).backward()
        theirs = twin(x)
        theirs[1].div_(2)
        loss(theirs).backward()
        assert torch.equal(ours[1], theirs[1])
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


class Branching(nn.Module):
    """What one step has no use for, at its end, another goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16)
        self.draws = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for draw in self.draws:
            hidden = self.first(x)
            loss = loss + hidden.square().mean()
            torch._dynamo.graph_break()
            x = self.second(hidden) if draw else 2 * hidden
        return loss


@pytest.mark.graphs
@pytest.mark.parametrize("regions", [None, ["first", "second"]])
def test_a_path_that_uses_what_the_planned_one_did_not(regions: list[str] | None) -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    plan_of(model, (x,), regions=regions).apply(model)
    for path in ([0], [0, 1], [1, 0, 0]):
        model.draws = twin.draws = path
        twin(x).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", planner.PlanWarning)
            loss = model(x)
        if regions is None and path == [0, 1]:
            with pytest.raises(planner.PlanMismatch, match=r"data decide the path .* with regions="):
                loss.backward()
            return
        loss.backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


class Parts(nn.Module):
    """Graphs that hand something on, and the part of the loss's making that each variant is about."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))


class AddsUp(Parts):
    """Every graph adds to a total in place, which the next one takes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.zeros(len(x))
        for layer in self.layers:
            x = layer(x).tanh()
            total += x.sum(1)
            torch._dynamo.graph_break()
        return (total.tanh(),)


class WritesThroughAView(Parts):
    """The second graph hands out a view of what it was given; the third writes through it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.layers[0](x).sin()
        torch._dynamo.graph_break()
        half, other = first[:4], first.exp()
        torch._dynamo.graph_break()
        half.add_(self.layers[1](x)[:4])
        torch._dynamo.graph_break()
        return (half * self.layers[2](other)[:4],)


class LeavesAPart(Parts):
    """A part is handed on from graph to graph, and the loss uses the other."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, used = self.layers[0](x).tanh(), self.layers[1](x).tanh()
        torch._dynamo.graph_break()
        used, left = self.layers[2](used).tanh() * left.detach(), left.view(-1)
        torch._dynamo.graph_break()
        return used.square(), left.square()


@pytest.mark.parametrize("build", [AddsUp, WritesThroughAView, LeavesAPart])
def test_what_graphs_hand_on_gets_its_gradient_or_none(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(8, 16)

    def loop(module: nn.Module) -> None:
        for _ in range(2):
            _loss(module(x)).backward()

    twin = copy.deepcopy(model)
    plan_of(model, (x,), loss=_loss).apply(model)
    with no_plan_warnings():
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.graphs
def test_a_gradient_that_the_probing_pass_overlooked_is_found_when_the_step_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probed: set[int] = set()
    end = TangentLayouts.end

    def overlook(layouts: TangentLayouts) -> None:
        end(layouts)
        if id(layouts) not in probed:
            probed.add(id(layouts))
            layouts.received.clear()

    monkeypatch.setattr(TangentLayouts, "end", overlook)
    torch.manual_seed(0)
    model, x = LeavesAPart(), torch.randn(8, 16)
    plan = plan_of(model, (x,), loss=_loss)
    assert len(probed) == 3
    report = planner.verify(model, (x,), plan=plan, loss=_loss, repeats=0)
    assert report.ok, report.problems


def _loss(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0].square().sum()


class Cut(torch.autograd.Function):
    """Its backward returns no gradient."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> None:
        return None


class Rounding(Scored):
    """One graph's output leads to such a function, which runs as written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden, other = self.first(x).tanh(), self.second(x)
        torch._dynamo.graph_break()
        rounded: torch.Tensor = torch.compiler.disable(Cut.apply)(hidden)
        return (other * rounded).square().mean()


def test_an_output_that_gets_no_gradient_from_a_function_of_the_users() -> None:
    model, x = Rounding(), torch.randn(8, 16)
    plan = plan_of(model, (x,))
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
