"""Module paths in plans, selections and tables are the names of ``named_modules()``."""

import fnmatch

import pytest
import torch
import torch.nn as nn

import planner
from planner.report.modules import module_rows
from planner.user_plan import Plan
from tests import zoo
from tests.small import layers_with_graph_breaks


def _paths(plan: Plan) -> set[str]:
    return {op.module for graph in plan.graphs for op in graph.ops} | {h.module for h in plan.peak_holders}


def _plan(model: nn.Module, x: torch.Tensor, **options: object) -> Plan:
    return planner.plan(model, (x,), budget="min", solver="sqrt_n", loss=zoo.scalar_loss, **options)  # type: ignore[arg-type]


def _kept(plan: Plan) -> list[str]:
    return [graph.ops[i].module for graph in plan.graphs for i in graph.kept]


@pytest.mark.heavy
def test_layers_of_a_submodule_that_is_captured_by_itself() -> None:
    model, args, kwargs = zoo.build("hf_gpt2_without_cache")
    plan = planner.plan(
        model, args, kwargs, budget="500%", solver="manual", checkpoints=["transformer.h.*"], keep=["lm_head"]
    )
    paths = _paths(plan)
    assert paths <= set(dict(model.named_modules()))
    assert {"transformer.h.0.attn.c_attn", "transformer.wte", "lm_head"} <= paths
    assert "h.0" not in paths
    recomputed = [graph.ops[i].module for graph in plan.graphs for i in graph.recomputed]
    for layer in range(3):
        assert fnmatch.filter(recomputed, f"transformer.h.{layer}.*")
        assert f"transformer.h.{layer}" in _kept(plan)
    rows = [row.name for row in module_rows(plan)]
    assert any("h.[0-2]" in name or name.startswith("transformer") for name in rows)


@pytest.mark.graphs
@pytest.mark.heavy
def test_what_a_layer_does_itself_between_graph_breaks_is_the_layers() -> None:
    model, args, _ = layers_with_graph_breaks()
    plan = _plan(model, *args)
    paths = _paths(plan)
    assert paths <= set(dict(model.named_modules()))
    assert {"layers.0", "layers.0.widen", "layers.1", "layers.1.narrow"} <= paths
    gelu = [o.module for g in plan.graphs for o in g.ops if "gelu" in o.name]
    assert gelu
    assert all(path.startswith("layers.") for path in gelu)


class _OddNames(nn.Module):
    """Submodules whose names are words that appear in sources, one under two names, one not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 16)
        self.attention = nn.ModuleDict({"self": nn.Sequential(nn.Linear(16, 16), nn.Tanh())})
        self.tied = self.attention["self"]
        self.hidden = [nn.Softplus()]
        self.tied_twice = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.module(x)
        x = self.tied(self.attention["self"](x))
        return self.hidden[0](x).square().mean()


def test_odd_names_modules_with_two_names_and_modules_in_lists() -> None:
    torch.manual_seed(0)
    model = _OddNames()
    plan = _plan(model, torch.randn(4, 8))
    paths = _paths(plan)
    assert paths == {"", "module", "attention.self.0", "attention.self.1"}
    by_name = {op.name: op.module for op in plan.graphs[0].ops}
    assert by_name["aten.softplus.default"] == ""  # of the module that calls it


@pytest.mark.heavy
def test_a_selection_by_the_name_that_the_user_sees() -> None:
    torch.manual_seed(0)
    model = _OddNames()
    plan = _plan(model, torch.randn(4, 8), keep=["attention.self"])
    assert "attention.self.0" in _kept(plan)  # the activation is written into the layer's result
    for name in ("attention.self", "attention.self.1"):
        again = _plan(model, torch.randn(4, 8), recompute=[name])
        assert "attention.self.0" not in _kept(again)
        assert [op.module for graph in again.graphs for op in map(graph.ops.__getitem__, graph.recomputed)]
    with pytest.raises(planner.PlannerError, match=r"is of tied_twice: it computes nothing"):
        _plan(model, torch.randn(4, 8), keep=["tied_*"])
    with pytest.raises(planner.PlannerError, match=r"names 'attention\.0'"):
        _plan(model, torch.randn(4, 8), keep=["attention.0"])
