"""A rule of how an operation runs again is one class: problem, schedule and emitted graphs follow it."""

import pytest
import torch
import torch.nn as nn
from torch.fx import Node

from planner.capture.capture import capture
from planner.costs.devices import find_device
from planner.graph import replay
from planner.graph.replay_rule import ReplayCall, ReplayRule
from planner.lowering.partition import no_recomputation, partition
from planner.problem.build import build_problem
from planner.training_step.step import Step

pytestmark = pytest.mark.heavy

aten = torch.ops.aten
MODEL, X = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)


class Clamped(ReplayRule):
    """``relu``, run again by another operator."""

    def matches(self, node: Node) -> bool:
        return node.target is aten.relu.default

    def call_again(self, node: Node) -> ReplayCall:
        return ReplayCall(aten.clamp_min.default, (node.args[0], 0), node.meta["val"])


class Once(ReplayRule):
    """``tanh``, which is not run again."""

    def matches(self, node: Node) -> bool:
        return node.target is aten.tanh.default

    def repeatable(self, node: Node) -> bool:
        return False


def test_a_rule_says_how_an_operation_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "REPLAY_RULES", (*replay.REPLAY_RULES, Clamped(), Once()))
    captured = capture(MODEL, Step((X,), {}, torch.sum))
    joint = captured.graphs[0].joint
    assert joint is not None
    relu = next(op for op in joint.ops if op.node.target is aten.relu.default)
    tanh = next(op for op in joint.ops if op.node.target is aten.tanh.default)
    assert relu.recomputable
    assert not tanh.recomputable

    problem = build_problem(captured, find_device("cpu"), None)
    rows = {source.op: row for row, source in enumerate(problem.sources) if source.graph == 0}
    assert problem.graph.rerun(rows[relu.index]) != rows[relu.index]
    assert not problem.graph.ops[rows[tanh.index]].recomputable

    halves = partition(joint, [relu.index, *no_recomputation(joint)])
    assert aten.clamp_min.default not in {n.target for n in halves.forward.graph.nodes}
    assert aten.clamp_min.default in {n.target for n in halves.backward.graph.nodes}
