"""Following a plan on a graph that is not the planned one."""

import copy
import json

import pytest
import torch
import torch.nn as nn

import planner
from planner.capture.capture import capture
from planner.errors import PlanWarning
from planner.graph.joint_graph import JointGraph
from planner.planfile.plan import GraphRecord
from planner.runtime.remap import remap_schedule, why_grown
from planner.training_step.step import Step
from planner.user_plan import Plan
from tests.side_by_side import Layers, layers, plan_of


def _joint(model: nn.Module) -> JointGraph:
    joint = capture(model, Step(layers()[1])).graphs[0].joint
    assert joint is not None
    return joint


def _record(plan: Plan) -> GraphRecord:
    assert plan.graphs[0].recomputed
    return plan.graphs[0]


@pytest.mark.heavy
def test_the_planned_graph_itself_is_followed_to_the_letter() -> None:
    model, args, _ = layers()
    record = _record(plan_of(model, args))
    remapped = remap_schedule(record, _joint(model))
    assert remapped.backward == record.backward
    assert remapped.followed == remapped.planned == len(record.recomputed)
    assert remapped.only_less


@pytest.mark.heavy
def test_every_backward_operation_runs_once_in_order_and_nothing_idle_is_re_run() -> None:
    model, args, _ = layers()
    record = _record(plan_of(model, args))
    for frozen in range(4):
        model.requires_grad_(True)
        model.layers[frozen].requires_grad_(False)  # type: ignore[index, union-attr]
        joint = _joint(model)
        remapped = remap_schedule(record, joint)
        split = joint.forward_length
        assert [i for i in remapped.backward if i >= split] == list(range(split, len(joint.ops)))
        used: set[int] = set()
        for index in reversed(remapped.backward):
            op = joint.ops[index]
            assert op.backward or not used.isdisjoint(op.allocates_again)
            used.update(op.reads)
        assert remapped.only_less


@pytest.mark.heavy
def test_a_layer_that_is_not_there_and_one_that_is_new() -> None:
    model, args, _ = layers()
    record = _record(plan_of(model, args))
    torch.manual_seed(0)
    fewer, more = _joint(Layers(2)), _joint(Layers(6))
    assert 0 < remap_schedule(record, fewer).followed < len(record.recomputed)
    assert remap_schedule(record, more).followed >= len(record.recomputed) - 1
    assert not remap_schedule(record, more).only_less


@pytest.mark.heavy
def test_layers_that_differ_in_their_numbers_alone() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(10))
            self.layers.extend(Layers().layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[10:]:
                x = x + layer(x)
            return x.square().mean()

    model, args, _ = layers()
    record = _record(plan_of(model, args))
    assert remap_schedule(record, _joint(Renamed())).backward == record.backward


def test_a_model_that_was_converted_after_it_was_planned_is_said_to_be() -> None:
    model, args, _ = layers()
    plan = plan_of(model, args)
    plan.apply(model).double()
    with pytest.warns(PlanWarning, match="parameters are float64, and were float32 when it was planned"):
        model(args[0].double()).backward()
    assert why_grown(plan, Layers(2)).startswith("its parameters or buffers have other names, shapes")
    assert why_grown(plan, Layers()) == "something else in the model sets sizes"


class _Scaled(nn.Module):
    """Multiplies by what is no mask, of as many bits as one in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x) * (x.abs() * 3).to(torch.uint8)).square().mean()


@pytest.mark.heavy
def test_what_is_no_mask_is_not_kept_as_bits_whatever_the_file_says() -> None:
    model, x = _Scaled(), torch.randn(64, 64)
    plan = planner.plan(copy.deepcopy(model), (x,), backend="graph", budget="100%", costs="roofline")
    data = json.loads(plan.dumps())
    (graph,) = data["graphs"]
    (cast,) = (i for i, op in enumerate(graph["ops"]) if op["name"] == "aten._to_copy.default")
    graph["packed"], graph["backward"] = [cast], [cast, *graph["backward"]]
    planned = Plan.loads(json.dumps(data)).apply(copy.deepcopy(model))
    with pytest.warns(PlanWarning, match="into other operations than when the plan was made"):
        planned(x).backward()
    model(x).backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(planned.parameters(), model.parameters(), strict=True)
    )  # type: ignore[arg-type]
    graph["completed"] = [cast]
    with pytest.raises(planner.PlanFileError, match=r"graphs\[0\].completed: nothing is kept on the host"):
        Plan.loads(json.dumps(data))
