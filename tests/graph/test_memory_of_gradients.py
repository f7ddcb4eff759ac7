"""Gradients that one computation gives to several inputs: no two in one memory, and what that takes."""

import pytest
import torch
import torch.nn as nn
from torch.fx import Graph

import planner
from planner.graph.memory_of_gradients import keep_gradients_apart
from tests.side_by_side import no_plan_warnings

aten = torch.ops.aten


class Sum(nn.Module):
    """Two parameters whose gradients are views of one memory."""

    def __init__(self, expanded: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(4096))
        self.expanded = expanded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.expanded:
            return self.first.sum() + self.second.sum() + x.sum()
        return (x @ (self.first.view(-1) + self.second).view(64, 64)).square().mean()


@pytest.mark.parametrize("expanded", [False, True])
def test_what_is_copied_is_predicted(expanded: bool) -> None:
    torch.manual_seed(0)
    model, x = Sum(expanded), torch.randn(8, 64)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", backend="graph", accumulate=True)
    with no_plan_warnings():
        report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_inductor_copies_them_too() -> None:
    torch.manual_seed(0)
    model, x = Sum(), torch.randn(8, 64)
    planner.plan(model, (x,), budget="1GiB", backend="inductor", solver="sqrt_n").apply(model)
    model(x).backward()
    first, second = model.first.grad, model.second.grad
    assert first is not None
    assert second is not None
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_views_are_copied_and_not_what_they_view() -> None:
    graph = Graph()
    tangent = graph.placeholder("tangent")
    passed = graph.call_function(aten.view.default, (tangent, [8]))
    made = graph.call_function(aten.neg.default, (tangent,))
    view = graph.call_function(aten.view.default, (made, [8]))
    total = graph.call_function(aten.sum.default, (tangent,))
    expanded = [graph.call_function(aten.expand.default, (total, [3])) for _ in range(2)]
    given, new, one = torch.empty(2, 4), torch.empty(2, 4), torch.empty(())
    values = given, given.view(8), new, new.view(8), *[one.expand(3)] * 2
    for node, value in zip((tangent, passed, made, view, *expanded), values, strict=True):
        node.meta["val"] = value
    graph.output([tangent, passed, made, view, *expanded, None])
    keep_gradients_apart(graph, forward_outputs=1)
    results = graph.output_node().args[0]
    assert results[:3] == [tangent, passed, made]
    assert (results[3].target, results[3].args[0]) == (aten.clone.default, view)
    assert results[4:] == [*expanded, None]
