"""Executions of a graph that are like an earlier one, as single operations."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.fx import GraphModule, symbolic_trace

import planner
from planner._torch.without_data.fake_values import ConstantTrackingFakeMode
from planner.capture.graphs import alike_executions
from planner.capture.graphs.alike_executions import AlikeExecutions

ALIKE: dict[str, Callable[..., Any]] = {
    "product": lambda x, w: (torch.tanh(x @ w),),
    "two results": lambda x, w: (torch.tanh(x @ w), x.relu() * 2),
    "transposed gradient": lambda x, w: ((x.t().contiguous() * 2), w.sum()),
    "expanded gradient": lambda x, w: (x.sum(), w.mean()),
    "argument not used": lambda x, w: (x.exp(),),
    "no gradient": lambda x, w: (x.exp(), (x > 0)),
    "passed on as it is": lambda x, w: (x + w, x - w),
    "random": lambda x, w: (nn.functional.dropout(x, 0.5) @ w,),
}
APART: dict[str, Callable[..., Any]] = {
    "changes an argument": lambda x, w: (x.detach().add_(1).sum() * w,),
    "view of an argument": lambda x, w: (x.t(),),
    "results in one storage": lambda x, w: (torch.tanh(x).chunk(2)[0], torch.tanh(w).chunk(2)[1]),
    "known values": lambda x, w: (torch.arange(4), x * 2),
}


def captured(function: Callable[..., Any]) -> GraphModule:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            return function(x, w)

    return symbolic_trace(Module())


def told(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def counted(graph: GraphModule) -> list[None]:
    """Grows with each execution of the graph's operations."""
    ran: list[None] = []
    forward = graph.forward

    def run(*args: Any) -> Any:
        ran.append(None)
        return forward(*args)

    graph.forward = run  # type: ignore[method-assign]
    return ran


def executed(run: Callable[[list[torch.Tensor]], Any], arrive: Callable[[Any], Any]) -> Any:
    """What an execution returns and the gradients that come of it."""
    x, w = torch.empty(4, 4, requires_grad=True), torch.empty(4, 4, requires_grad=True)
    results = run([x, w])
    outcome = [told(r) for r in results]
    differentiable = [r for r in results if r.requires_grad]
    given = [arrive(r) for r in differentiable]
    used = [(r, g) for r, g in zip(differentiable, given, strict=True) if g is not None]
    if used:
        wanted, gradients = zip(*used, strict=True)
        found = torch.autograd.grad(wanted, [x, w], gradients, allow_unused=True)
        outcome += [told(g) for g in found]
    return outcome


ARRIVALS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "alike": torch.empty_like,
    "expanded": lambda r: torch.empty((), dtype=r.dtype).expand_as(r),
    "transposed": lambda r: torch.empty_like(r).t().contiguous().t() if r.dim() == 2 else torch.empty_like(r),
    "only the matrices": lambda r: torch.empty_like(r) if r.dim() == 2 else None,
}


@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("name", ALIKE)
def test_results_and_gradients_are_those_of_the_operations(name: str, arrival: str) -> None:
    graph, arrive = captured(ALIKE[name]), ARRIVALS[arrival]
    with ConstantTrackingFakeMode():
        expected = executed(lambda args: graph(*args), arrive)
        ran = counted(graph)
        alike = AlikeExecutions(graph)
        for _ in range(4):
            assert executed(alike, arrive) == expected
    assert len(ran) == 2  # the first execution, and once more for gradients


@pytest.mark.parametrize("name", APART)
def test_what_is_no_single_operation_runs_each_time(name: str) -> None:
    graph = captured(APART[name])
    with ConstantTrackingFakeMode():
        expected = executed(lambda args: graph(*args), torch.empty_like)
        ran = counted(graph)
        alike = AlikeExecutions(graph)
        for _ in range(3):
            assert executed(alike, torch.empty_like) == expected
    assert len(ran) == 3


def test_other_arguments_are_another_execution() -> None:
    graph = captured(lambda x, w: (x + w,))
    with ConstantTrackingFakeMode():
        alike, w = AlikeExecutions(graph), torch.empty(4, 4)
        for x in (torch.empty(4, 4), torch.empty(4, 4).t().contiguous().t(), torch.empty(1, 4)) * 2:
            assert told(alike([x, w])[0]) == told(graph(x, w)[0])
        with torch.no_grad():
            assert not alike([torch.empty(4, 4, requires_grad=True), w])[0].requires_grad


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_layers_that_share_a_graph_are_captured_as_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[None] = []
    inside = alike_executions._Inside.gradients

    def gradients(self: Any, arrived: Any) -> Any:
        alone.append(None)
        return inside(self, arrived)

    monkeypatch.setattr(alike_executions._Inside, "gradients", gradients)
    planner.plan(Deep(6), (torch.randn(2, 4),), budget="100%", regions=["layers.*"])
    assert (
        len(alone) == 4
    )  # the first layer's input needs no gradient, and the second is the first of its kind


@pytest.mark.heavy
def test_a_thousand_layers() -> None:
    torch.manual_seed(0)
    model, x = Deep(1100), torch.randn(2, 4)
    planned = copy.deepcopy(model)
    plan = planner.plan(planned, (x,), budget="min", regions=["layers.*"])
    assert len(plan.graphs) < 10
    plan.apply(planned)
    for trained in (model, planned):
        trained(x).backward()
    for theirs, ours in zip(model.parameters(), planned.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        assert torch.equal(theirs.grad, ours.grad)
