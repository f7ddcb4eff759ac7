"""Gradients between graphs are added up in eager's order, and have the strides of eager's."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.user_plan import Plan
from planner.verification.verify import Report


class Straddles(nn.Module):
    """A weight that is used several times before a graph break and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        for _ in range(3):
            x = torch.tanh(x @ weight)
        torch._dynamo.graph_break()
        for _ in range(2):
            x = torch.tanh(x @ weight)
        return self.second(x).square().mean()


class HandsOn(nn.Module):
    """An activation that one graph makes, the next one uses several times, and the last one once more.

    ``y + 1`` hands its own sum of gradients on to ``y``, as residual connections do; ``y * y`` and the mean
    squared error use it twice in one operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        z = y + 1
        a = torch.tanh(self.layers[1](z)) * torch.sigmoid(self.layers[2](z))
        b = self.layers[3](y * y) + F.mse_loss(y, y.transpose(0, 1))
        torch._dynamo.graph_break()
        return (self.layers[4](y) * a * b).square().mean()


class AnyRows(nn.Module):
    """An activation that one graph uses several times and the next one once more, of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        a = torch.tanh(self.layers[1](y)) * torch.sigmoid(self.layers[2](y)) * y[: len(y) // 2].mean()
        torch._dynamo.graph_break()
        return (self.layers[3](y) * a).square().mean()


class Tied(nn.Module):
    """Words in and out share a weight, and the loss, outside of the module, uses it too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(x)))


class Turned(nn.Module):
    """Gradients that come back transposed, over which the bias of a layer then sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(40, 16)
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.bias
        torch._dynamo.graph_break()
        return self.second(y.transpose(1, 2)).tanh().square().mean()


class Views(nn.Module):
    """A result and a view of it leave a graph that has used the result after the view was taken."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(uses + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        y = torch.tanh(first(x))
        part = y[:32]
        z = x + sum(torch.tanh(layer(y)) for layer in others)
        torch._dynamo.graph_break()
        return (y * z).square().mean() + part.exp().mean()


class Flattened(nn.Module):
    """A view of a result, used before a graph break and after it, beside the result or a detached copy."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.norm, self.layers = nn.LayerNorm(32), nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layers[0](x))
        flat = y.flatten(0, 1)
        other = y.detach() if self.detached else y
        z = torch.sigmoid(self.layers[1](flat)) * self.layers[2](flat) + self.layers[3](flat)
        torch._dynamo.graph_break()
        z = z + self.layers[4](flat).square()
        return z.square().mean() + other.detach().sum()


class Classes(nn.Module):
    """Scores of classes, which come last, where a cross entropy wants them in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(24, 48), nn.Parameter(torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.bias


Built = tuple[nn.Module, tuple[Any, ...], Callable[[Any], torch.Tensor] | None]


def _straddles() -> Built:
    return Straddles(), (torch.randn(64, 64),), None


def _hands_on() -> Built:
    return HandsOn(), (torch.randn(64, 64),), None


def _turned() -> Built:
    return Turned(), (torch.randn(32, 40, 24),), None


def _exactly(built: Built, budget: str) -> tuple[Plan, Report]:
    model, args, loss = built
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, args, budget=budget, loss=loss, solver="sqrt_n")
        # As it is read from a file: the plan says all that is needed.
        plan = Plan.loads(plan.dumps())
        report = planner.verify(model, args, plan=plan, loss=loss, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    return plan, report


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("build", "budget"),
    [
        (_hands_on, "min"),
        *(
            pytest.param(*case, marks=pytest.mark.heavy)
            for case in ((_straddles, "min"), (_hands_on, "500%"))
        ),
    ],
)
def test_uses_before_and_after_a_break_add_up_as_without_a_plan(
    build: Callable[[], Built], budget: str
) -> None:
    torch.manual_seed(0)
    plan, _ = _exactly(build(), budget)
    assert any(g.per_use_inputs for g in plan.graphs)


@pytest.mark.graphs
@pytest.mark.heavy
def test_uses_add_up_as_without_a_plan_where_sizes_are_symbols() -> None:
    torch.manual_seed(0)
    model = AnyRows()
    twin = copy.deepcopy(model)
    plan, _ = _exactly((model, (torch.randn(64, 64),), None), "min")
    assert any(g.per_use_inputs for g in plan.graphs)
    plan.apply(model)
    for rows in (48, 40, 36):
        x = torch.randn(rows, 64)
        for each in (model, twin):
            each.zero_grad()
            each(x).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.heavy
def test_uses_in_the_loss_add_up_as_without_a_plan() -> None:
    torch.manual_seed(0)
    model = Tied()

    def loss(output: torch.Tensor) -> torch.Tensor:
        # Of the user's model, where planning runs on a copy.
        return output.square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())

    plan, _ = _exactly((model, (torch.randint(64, (4, 16)),), loss), "min")
    assert plan.graphs[0].per_use_inputs
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.graphs
@pytest.mark.heavy
def test_gradients_lie_in_memory_as_without_a_plan() -> None:
    torch.manual_seed(0)
    plan, _ = _exactly(_turned(), "min")
    assert plan.graphs[0].gradient_layouts[0].dimensions == [0, 2, 1]


class Thirds(nn.Module):
    """Returns a part of what it computes, on which a loss works as on a tensor with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x).split(32, -1)[2]


class Halves(nn.Module):
    """A part of the forward hands on halves of what an earlier part made."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.beside, self.add = nn.Linear(32, 64), nn.Linear(32, 8), nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.mix(x)
        torch._dynamo.graph_break()
        _, second = both.unflatten(-1, (2, -1)).unbind(-2)
        beside = self.beside(x)
        torch._dynamo.graph_break()
        return (second + self.add).exp() * beside.mean()


class Transposed(nn.Module):
    """A part of the forward uses twice what an earlier part hands on transposed, and the loss does too."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = self.parts[0](x).tanh().transpose(0, 1)
        torch._dynamo.graph_break()
        return turned, self.parts[1](turned) * self.parts[2](turned).sigmoid()


@pytest.mark.graphs
def test_uses_of_what_lies_transposed_add_up_as_without_a_plan() -> None:
    torch.manual_seed(0)

    def loss(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return outputs[0].square().mean() + outputs[1].square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan, _ = _exactly((Transposed(), (torch.randn(64, 64),), loss), "min")
    assert plan.graphs[1].per_use_inputs


@pytest.mark.parametrize(("build", "laid_out"), [(Thirds, [[0, 1, 2]]), (Halves, [])])
def test_gradients_of_parts_lie_in_memory_as_without_a_plan(build: type[nn.Module], laid_out: object) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan, _ = _exactly((build(), (torch.randn(4, 16, 32),), lambda y: y.square().mean()), "min")
    assert [layout.dimensions for g in plan.graphs for layout in g.gradient_layouts] == laid_out


@pytest.mark.graphs
@pytest.mark.heavy
def test_an_order_that_views_change_is_warned_of() -> None:
    torch.manual_seed(0)
    _exactly((Views(0), (torch.randn(64, 64),), None), "min")  # two gradients are the same either way round
    with pytest.warns(planner.PlanWarning, match="another order"):
        plan = planner.plan(Views(2), (torch.randn(64, 64),), budget="min", solver="sqrt_n")
    assert any("another order" in note for note in plan.notes)


@pytest.mark.heavy
@pytest.mark.parametrize("detached", [False, True])
def test_outputs_without_gradient_do_not_change_the_order_of_a_view_beside_them(detached: bool) -> None:
    torch.manual_seed(0)
    _exactly((Flattened(detached), (torch.randn(4, 32, 32),), None), "min")


@pytest.mark.heavy
def test_a_loss_that_transposes_is_planned_or_warned_of() -> None:
    torch.manual_seed(0)
    classes = torch.randint(48, (32, 40))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.transpose(1, 2), classes)

    model, x = Classes(), torch.randn(32, 40, 24)
    plan, _ = _exactly((model, (x,), loss), "min")
    assert plan.graphs[0].gradient_layouts
    planner.plan(model, (x,), budget="min", solver="sqrt_n").apply(model)  # for another loss
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        for other in (torch.square, torch.sum):
            model.zero_grad()
            other(model(x)).mean().backward()
        model.zero_grad()
    with pytest.warns(planner.PlanWarning, match="has other strides"):
        loss(model(x)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        model.zero_grad()
        loss(model(x)).backward()  # warned of once


class FrozenFirst(nn.Module):
    """Layers of the same code, of which the first has nothing to differentiate; ``numbered`` ones are a graph
    each, others share one where they can."""

    def __init__(self, *, numbered: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.numbered = numbered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for layer in range(4) if self.numbered else self.layers:
            torch._dynamo.graph_break()
            layer = self.layers[layer] if self.numbered else layer
            x = torch.tanh(layer(x)) * torch.sigmoid(x) + x
            torch._dynamo.graph_break()
            total = total + x
        return total.square().mean()


@pytest.mark.graphs
@pytest.mark.heavy
def test_layers_of_the_same_code_have_their_own_plans_though_one_has_no_backward() -> None:
    torch.manual_seed(0)
    plan, _ = _exactly((FrozenFirst(numbered=True), (torch.randn(64, 64),), None), "80%")
    layers = [g for g in plan.graphs if g.occurrences == 4]
    assert len({tuple(layer.kept) for layer in layers}) == 3
    assert [g.occurrence for g in layers if g.structure == layers[0].structure] == [1, 2, 3]


@pytest.mark.graphs
@pytest.mark.heavy
def test_layers_that_share_a_graph_have_their_own_programs() -> None:
    torch.manual_seed(0)
    plan, _ = _exactly((FrozenFirst(numbered=False), (torch.randn(64, 64),), None), "80%")
    layers = [g for g in plan.graphs if g.structure == plan.graphs[0].structure]
    assert [g.occurrence for g in layers] == [1, 2]
    assert [len(g.executions) for g in layers] == [1, 2]
    assert len(layers[1].other_programs) == 1


class ChangesWhatItIsGiven(nn.Module):
    """What one graph returns is changed in place by the next, which has one use of another result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            z = layer(torch.sigmoid(y))
            torch._dynamo.graph_break()
            z += y
            y = z
        return y.square().mean()


def test_a_graph_that_changes_what_it_is_given(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = ChangesWhatItIsGiven().train(), torch.randn(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
        report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert "Traceback" not in capfd.readouterr().err
