"""Planning a step and running the plan trace graphs in one way, with the same corrections."""

import pytest
import torch
import torch.nn as nn
from torch.fx import GraphModule

import planner
from planner._torch.joint.memory_layout import MemoryLayout
from planner.capture.graphs import graph_runner
from planner.graph.joint_pass import TraceContext
from planner.graph.passes import JOINT_PASSES
from planner.graph.spec import GraphSpec
from planner.planfile.graph_record import GradientLayout
from planner.runtime import backend
from tests.plans import layered_plan


def test_a_pass_corrects_what_is_planned_and_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []

    def noted(joint: GraphModule, context: TraceContext) -> None:
        """Adding a joint pass is a function of its own and an entry in the tuple."""
        traced.append(str(joint.graph))
        assert len(context.inputs) == len(context.forward.graph.find_nodes(op="placeholder"))

    for module in (graph_runner, backend):
        monkeypatch.setattr(module, "JOINT_PASSES", (*JOINT_PASSES, noted))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.15), nn.Tanh()).train(), torch.randn(2, 4)
    plan = planner.plan(model, args=(x,), loss=torch.sum, budget="2MB", solver="sqrt_n")
    assert len(traced) == 1
    plan.apply(model)(x).sum().backward()
    assert traced == [traced[0]] * 2
    assert "masked_product" in traced[0]  # with the mask divided as eager does


def test_a_specification_is_read_from_the_plan() -> None:
    (graph,) = layered_plan(layers=2, kept_layers=1).graphs
    layout = GradientLayout(output=1, dimensions=[1, 0], inside=[8, 0], step=2)
    record = graph.model_copy(
        update={"unused_outputs": [2], "per_use_inputs": [3, 0], "gradient_layouts": [layout]}
    )
    spec = GraphSpec.of(record)
    assert spec == GraphSpec((2,), frozenset({0, 3}), {1: MemoryLayout((1, 0), (8, 0), 2)})
    assert len({spec.digest, GraphSpec().digest, GraphSpec((2,)).digest}) == 3
