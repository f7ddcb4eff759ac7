"""Graphs are written out, as text or as code, and settings are recommended, only where somebody reads it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo.variables import tensor as tensor_variables
from torch._functorch._aot_autograd import graph_compile
from torch._logging._internal import LazyTraceHandler, trace_log
from torch.fx import Graph, GraphModule

import planner
from planner._torch.joint.graph_modules import graph_module
from planner._torch.tracing.error_logs import traces_are_written


def test_graphs_are_written_out_where_logs_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    original = GraphModule.print_readable

    def noted(self: GraphModule, *args: object, **kwargs: object) -> str:
        written.append(self)
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(GraphModule, "print_readable", noted)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).train(), torch.randn(2, 4)
    planner.plan(model, (x,), loss=torch.sum, budget="min", solver="sqrt_n")
    assert not written
    monkeypatch.setattr(graph_compile.aot_joint_log, "level", logging.INFO)
    graph_compile.aot_joint_log.manager._clear_cache()
    planner.plan(model, (x,), loss=torch.sum, budget="min", solver="sqrt_n")
    assert written


def test_no_code_is_written_of_joint_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    original = Graph.python_code

    def noted(self: Graph, *args: Any, **kwargs: Any) -> Any:
        written.append([node.name for node in self.find_nodes(op="placeholder")])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Graph, "python_code", noted)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()).train(), torch.randn(3, 4)
    plan = planner.plan(model, (x,), loss=torch.sum, budget="min", solver="sqrt_n")
    plan.apply(model)(x).sum().backward()
    assert written  # Dynamo's graphs
    assert not [names for names in written if any(name.startswith("tangents") for name in names)]


def test_code_is_written_when_it_is_asked_for() -> None:
    made = graph_module(nn.Module(), torch.fx.symbolic_trace(nn.Tanh()).graph)
    assert "_code" not in vars(made)
    assert "tanh" in made.code
    assert torch.equal(made(torch.ones(2)), torch.ones(2).tanh())


class AsksForANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * x.abs().sum().item()


@pytest.mark.parametrize("ours", [True, False])
def test_no_setting_of_dynamo_is_recommended_for_plans(
    monkeypatch: pytest.MonkeyPatch, *, ours: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tensor_variables.log, "warning", lambda text, *_: said.append(text))
    tensor_variables.TensorVariable._warn_capture_scalar_outputs.cache_clear()
    model, x = AsksForANumber(), torch.randn(2, 4)
    if ours:
        planner.plan(model, (x,), loss=torch.sum, budget="min").apply(model)
    else:
        model.compile(backend="eager")
    model(x).sum().backward()
    assert any("capture_scalar_outputs" in text for text in said) is not ours


def test_what_waits_for_a_folder_reads_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an ordinary process PyTorch adds a handler by itself, which goes away at the first note."""
    monkeypatch.setattr(trace_log, "handlers", [LazyTraceHandler(None)])
    assert not traces_are_written()
    monkeypatch.setattr(trace_log, "handlers", [LazyTraceHandler(None), LazyTraceHandler(str(tmp_path))])
    assert traces_are_written()
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()])
    assert traces_are_written()
