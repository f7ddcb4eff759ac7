"""Graphs are written out as text only where somebody reads it."""

import logging

import pytest
import torch
import torch.nn as nn
from torch._functorch._aot_autograd import graph_compile
from torch.fx import GraphModule

import planner
from planner._torch.graph_modules import graph_module


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


def test_code_is_written_when_it_is_asked_for() -> None:
    made = graph_module(nn.Module(), torch.fx.symbolic_trace(nn.Tanh()).graph)
    assert "_code" not in vars(made)
    assert "tanh" in made.code
    assert torch.equal(made(torch.ones(2)), torch.ones(2).tanh())
