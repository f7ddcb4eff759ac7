"""A gradient that leaves a graph, and others that are added to it outside: memory, bits, and no warning."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.fx import Graph

import planner
from planner.lowering.gradients_handed_out import hand_out_no_views
from tests.side_by_side import no_plan_warnings

aten = torch.ops.aten


class InParts(nn.Module):
    """A large tensor whose last use is a graph of its own, by the way of which its first gradient comes."""

    def __init__(self, use: Callable[[nn.Module, torch.Tensor], torch.Tensor], grow: nn.Module) -> None:
        super().__init__()
        self.grow, self.use = grow, use
        self.ways = nn.ModuleList([nn.Linear(64, 1) for _ in range(3)]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.grow(x)
        torch._dynamo.graph_break()
        first = large.neg().sum()
        torch._dynamo.graph_break()
        return self.use(self.ways, large).square().sum() + first


def _one_view(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    flat = large.view(-1, 64)
    return ways[0](flat) + ways[1](flat)


def _several_views(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large.view(-1, 64)) + ways[1](large.view(-1, 64)) + ways[2](large.view(-1, 64))


def _no_views(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large * 2) + ways[1](large * 3)


def _transposed(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large.transpose(0, 1)).sum(0) + ways[1](large).sum(1)


def _expanded(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return large.sum()


def _a_part(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large[:4])


def _part_and_view(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large.view(-1, 64)).sum() + large[2:].exp().sum()


def _as_image(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return F.conv2d(large.view(8, 64, 64, 8), large.new_ones(4, 64, 3, 3), stride=8)


def _linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 64), torch.randn(8, 512, 4)


def _image() -> tuple[nn.Module, torch.Tensor]:
    return nn.Conv2d(2, 32768, 1), torch.randn(8, 2, 1, 1)


def _flat_image(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large.flatten(1).view(-1, 64))


def _image_twice(ways: nn.Module, large: torch.Tensor) -> torch.Tensor:
    return ways[0](large.flatten(1).view(-1, 64)) + ways[1](large.reshape(-1, 64))


_WAYS = [_one_view, _several_views, _no_views, _transposed, _expanded, _a_part, _part_and_view, _as_image]
_IMAGES = [_flat_image, _image_twice]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("use", "start"),
    [*((use, _linear) for use in _WAYS), *((use, _image) for use in _IMAGES)],
    ids=lambda value: value.__name__.strip("_"),
)
def test_what_is_added_to_it_takes_what_was_predicted(
    use: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    start: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    torch.manual_seed(0)
    grow, x = start()
    model = InParts(use, grow).train()
    with no_plan_warnings():
        report = planner.verify(model, (x,), plan=planner.plan(model, (x,), budget="min"), repeats=0)
    assert report.ok, report.problems
    assert report.exact
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


class Pixels(nn.Module):
    """Images of one pixel, whose first gradient comes back transposed; notes its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.norm, self.head = nn.Conv2d(48, 48, 1), nn.BatchNorm2d(48), nn.Linear(48, 48)
        self.strides: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.grow(x))
        torch._dynamo.graph_break()
        x.register_hook(lambda gradient: self.strides.append(gradient.stride()))
        pooled = F.avg_pool2d(x, 3, 1, 1).square().sum()
        torch._dynamo.graph_break()
        return self.head(x.flatten(2).transpose(1, 2)).exp().sum() + pooled


@pytest.mark.heavy
def test_a_view_stays_one_where_later_strides_depend_on_it() -> None:
    """Sums in place have the strides of the first, others do not, which kernels look at."""
    torch.manual_seed(0)
    model, x = Pixels().train(), torch.randn(512, 48, 1, 1)
    plain = copy.deepcopy(model)
    plain(x).backward()
    plan = planner.plan(model, (x,), budget="min")
    with no_plan_warnings():
        report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.exact
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    planned = plan.apply(model)
    planned.strides.clear()
    planned(x).backward()
    assert planned.strides == plain.strides


class Tied(nn.Module):
    """A weight that two graphs use: its first gradient is a view, as that of every linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4096, 64), nn.Linear(64, 4096, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.words(x).tanh()
        torch._dynamo.graph_break()
        return self.head(found).logsumexp(-1).sum()


def test_a_weight_of_two_graphs() -> None:
    torch.manual_seed(0)
    model, x = Tied().train(), torch.randint(4096, (2, 4))
    with no_plan_warnings():
        report = planner.verify(model, (x,), plan=planner.plan(model, (x,), budget="min"), repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


def test_views_of_what_was_given_stay_views() -> None:
    graph = Graph()
    tangent = graph.placeholder("tangent")
    passed = graph.call_function(aten.view.default, (tangent, [8]))
    made = graph.call_function(aten.neg.default, (tangent,))
    given = torch.empty(2, 4)
    values = given, given.view(8), torch.empty(2, 4)
    for node, value in zip((tangent, passed, made), values, strict=True):
        node.meta["val"] = value
    graph.output([passed, made, None])
    hand_out_no_views(graph)
    assert graph.output_node().args[0] == [passed, made, None]


def test_views_of_what_is_made_are_detached() -> None:
    graph = Graph()
    tangent = graph.placeholder("tangent")
    made = graph.call_function(aten.neg.default, (tangent,))
    view = graph.call_function(aten.view.default, (made, [8]))
    new = torch.empty(2, 4)
    for node, value in zip((tangent, made, view), (torch.empty(2, 4), new, new.view(8)), strict=True):
        node.meta["val"] = value
    graph.output([view, None])
    hand_out_no_views(graph)
    results: Any = graph.output_node().args[0]
    assert (results[0].target, results[0].args[0]) == (aten.detach.default, view)
    assert results[1] is None


class _Collects(nn.Module):
    """What layers return is stacked, and used again with what later ones return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for layer in self.layers:
            found.append(layer(x))
            x = x + torch.stack(found).mean(0)
        return x.square().mean()


@pytest.mark.heavy
def test_parts_of_what_was_stacked_leave_as_views_as_eagers_do() -> None:
    torch.manual_seed(0)
    model, x = _Collects().train(), torch.randn(32, 32)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", regions="auto")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class SharedGradient(nn.Module):
    """Parameters whose gradients are one result, or views of one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rows = 4 if kind == "a whole and its parts" else 8
        self.kind, self.linear = kind, nn.Linear(16, 16)
        self.first = nn.Parameter(torch.randn(8, 16))
        self.second = nn.Parameter(torch.randn(128) if kind == "views" else torch.randn(rows, 16))
        self.third = nn.Parameter(torch.randn(rows, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "views":
            table = (self.first.view(-1) + self.second).view(8, 16)
        elif self.kind == "a whole and its parts":
            table = torch.cat([self.second, self.third]) + self.first
        else:
            table = self.first + self.second
        return table, self.linear(torch.tanh(x + table)).square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("kind", ["one result", "views", "a whole and its parts"])
@pytest.mark.parametrize("of_the_output", [False, True])
def test_no_two_gradients_lie_in_one_memory(kind: str, of_the_output: bool) -> None:
    torch.manual_seed(0)
    model, x = SharedGradient(kind), torch.randn(4, 8, 16)
    twin = copy.deepcopy(model)

    def loss(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return found[1] + found[0].sin().sum() if of_the_output else found[1]

    plan = planner.plan(model, (x,), budget="min", loss=loss, accumulate=True, costs="roofline")
    plan.apply(model)
    for _ in range(2):
        for one in (model, twin):
            loss(one(x)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
