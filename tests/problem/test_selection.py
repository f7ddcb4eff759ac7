"""Modules and operators that users keep or recompute by name."""

import pytest

import planner
from planner.problem.selection import SelectionError, select
from solvers import Graph, Op, Phase, Value
from tests.small import small_gpt


def _recomputed(plan: planner.Plan) -> set[tuple[str, str]]:
    graph = plan.graphs[0]
    return {(graph.ops[i].name, graph.ops[i].module) for i in graph.recomputed}


@pytest.mark.parametrize("solver", ["auto", "chain"])
@pytest.mark.heavy
def test_what_is_to_be_kept_is_never_recomputed(solver: str) -> None:
    model, args, kwargs = small_gpt(layers=2)
    keep = ["blocks.1", "aten.native_layer_norm"]
    plan = planner.plan(model, args, kwargs, budget="min", solver=solver, keep=keep, time_limit=10)
    recomputed = _recomputed(plan)
    assert recomputed
    assert not [r for r in recomputed if r[1].startswith("blocks.1") or "layer_norm" in r[0]]
    assert planner.verify(model, args, kwargs, plan=plan, repeats=0).ok


@pytest.mark.heavy
@pytest.mark.parametrize("solver", ["ilp", "none"])
def test_what_is_to_be_recomputed_is_not_kept(solver: str) -> None:
    model, args, kwargs = small_gpt(layers=2)
    plan = planner.plan(
        model, args, kwargs, budget="500%", solver=solver, recompute=["blocks.*.widen"], time_limit=10
    )
    graph = plan.graphs[0]
    kept = {graph.ops[i].module for i in graph.kept}
    assert not [m for m in kept if m.endswith("widen")]
    assert len([r for r in _recomputed(plan) if r[1].endswith("widen")]) == 2
    assert planner.verify(model, args, kwargs, plan=plan, repeats=0).ok


@pytest.mark.heavy
def test_checkpoints_by_hand() -> None:
    model, args, kwargs = small_gpt(layers=4)
    names = [f"blocks.{i}" for i in range(4)]
    plan = planner.plan(model, args, kwargs, budget="500%", solver="manual", checkpoints=names)
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert plan.predicted.dynamic_peak_bytes < 0.7 * plan.no_recompute.dynamic_peak_bytes
    assert len(plan.graphs[0].recomputed) > 20


@pytest.mark.heavy
@pytest.mark.parametrize("argument", ["keep", "recompute", "checkpoints"])
def test_a_name_that_matches_nothing_is_refused_with_near_ones(argument: str) -> None:
    model, args, kwargs = small_gpt(layers=2)
    with pytest.raises(SelectionError, match=rf"{argument}= names 'block\.1'.*blocks\.1"):
        planner.plan(model, args, kwargs, budget="80%", solver="sqrt_n", **{argument: ["block.1"]})


@pytest.mark.heavy
def test_a_contradiction_is_refused() -> None:
    model, args, kwargs = small_gpt(layers=2)
    with pytest.raises(SelectionError, match=r"the result of aten\.\S+ in .* leave it out of one"):
        planner.plan(model, args, kwargs, budget="80%", keep=["blocks.0"], recompute=["blocks.0.widen"])


def test_a_collectives_result_is_kept_unless_the_step_overwrites_it() -> None:
    gather = "_c10d_functional.all_gather_into_tensor.default"
    ops = [Op((), (v,), 1.0, name=gather) for v in range(2)]
    ops.append(Op((0, 1), (), 1.0, phase=Phase.BACKWARD))
    constraints = select(Graph(tuple(ops), (Value(8, "kept"), Value(8, "overwritten", overwritten=True))))
    assert constraints.keep is not None
    assert constraints.keep.tolist() == [True, False]
    assert constraints.recompute is not None
    assert constraints.recompute.tolist() == [False, True]
