"""Masks kept as bits: the same gradients, the predicted peak, and a plan that says so."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner import Plan
from planner.lazy.cached import made_of
from planner.planfile.budget import Budget
from planner.planfile.simulated import simulated
from planner.planning import solve
from planner.planning.encodings import Solved
from planner.planning.solve_for import solve_for
from planner.planning.solve_many import _monotone
from solvers.model.graph import Graph
from solvers.model.solution import Solution, Status
from solvers.programs.lower_bound import Bound

pytestmark = pytest.mark.heavy

X = torch.randn(64, 32)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.dropout(self.widen(x).tanh(), 0.15, self.training))


def blocks(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(4))).train()


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def planned(model: nn.Module, x: torch.Tensor = X, **options: object) -> Plan:
    given = {"budget": "min", "solver": "sqrt_n", "loss": squares, **options}
    return planner.plan(model, (x,), **given)  # type: ignore[arg-type]


def masks(plan: Plan) -> int:
    return sum(len(graph.packed) for graph in plan.graphs)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(blocks())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.heavy)])
def test_bits_and_bytes_are_as_promised(dtype: torch.dtype) -> None:
    model, x = blocks().to(dtype), X.to(dtype)
    plan = planned(model, x)
    assert masks(plan) > 0
    report = planner.verify(model, (x,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_bits_take_less_time_than_drawing_again_and_less_memory_than_masks(plan: Plan) -> None:
    without = planned(blocks(), encodings="none")
    assert masks(without) == 0
    assert without.solver.bound_covers == "every schedule"
    assert plan.predicted.peak_bytes < without.predicted.peak_bytes
    assert plan.no_recompute == without.no_recompute
    bounded = planned(blocks(), budget=without.predicted.peak_bytes)
    assert masks(bounded) > 0
    assert bounded.predicted.seconds < without.predicted.seconds


def test_solving_without_bits_has_the_time_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def noted(*args: Any, time_limit: float, **given: Any) -> Solution:
        limits.append(time_limit)
        return solve_for(*args, time_limit=time_limit, **given)

    monkeypatch.setattr(solve, "solve_for", noted)
    planned(blocks(), time_limit=8)
    assert limits == [8, 4]


def test_what_cannot_be_better_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Solution] = []

    def noted(*args: Any, **given: Any) -> Solution:
        searched.append(solve_for(*args, **given))
        return searched[-1]

    monkeypatch.setattr(solve, "solve_for", noted)
    step, alone = (planner.prepare(blocks(), X, loss=squares, encodings=e) for e in ("auto", "none"))
    least = alone.plan("min").predicted.peak_bytes
    searched.clear()
    plan = step.plan(int(1.2 * least))
    assert plan.recomputed_operations > 0
    assert plan.solver.bound_covers == "schedules that pack no masks"
    assert len(searched) == 1
    # Where no schedule without bits is within the budget, as far as bounds tell.
    first_bound = solve.first_bound

    def proven(graph: Graph, budget: int, seconds: float) -> Bound:
        bound = first_bound(graph, budget, seconds)
        return bound if any("pack_bits" in op.name for op in graph.ops) else Bound(math.inf, bound.moment)

    monkeypatch.setattr(solve, "first_bound", proven)
    plan = step.plan(int(1.1 * least))
    assert len(searched) == 2
    assert plan.solver.bound_covers == "schedules that pack masks"
    # What is found in the one that is solved first may be nothing.
    step.plan("min")
    assert len(searched) == 4


def test_a_cached_plan_with_bits_is_not_one_without() -> None:
    model = blocks()
    assert made_of(model, {"encodings": "none"}) != made_of(model, {})
    assert made_of(model, {"regions": "auto"}) != made_of(model, {})


def test_a_sweep_packs_as_well() -> None:
    given = {"budgets": ["min", "70%", "75%"], "loss": squares, "time_limit": 240}
    x = torch.randn(128, 64)
    plans = planner.sweep(blocks(64), (x,), **given)  # type: ignore[arg-type]
    without = planner.sweep(blocks(64), (x,), encodings="none", **given)  # type: ignore[arg-type]
    assert any(masks(plan) for plan in plans)
    assert not any(masks(plan) for plan in without)
    assert plans[-1].predicted.peak_bytes < without[-1].predicted.peak_bytes
    assert plans[0].predicted.seconds < without[0].predicted.seconds
    assert [plan.predicted.seconds for plan in plans] == sorted(plan.predicted.seconds for plan in plans)


def test_the_least_peak_is_an_answer_to_larger_budgets_of_a_sweep() -> None:
    nothing: Any = None
    found = [
        Solved(Solution("auto", Status.FEASIBLE, nothing, peak, seconds, 0.0), nothing)
        for peak, seconds in ((150, 6.0), (100, 5.0), (180, 4.0))
    ]
    on_cpu: Any = SimpleNamespace(device=SimpleNamespace(kind="cpu"))
    answers = _monotone(
        on_cpu, [Budget(peak, str(peak)) for peak in (160, 100, 200)], found, [160, None, 200]
    )
    assert [answer.solution.seconds for answer in answers] == [5.0, 5.0, 4.0]
    assert answers[0].solution.peak_bytes == 100


def test_a_budget_that_needs_no_recomputation_packs_nothing() -> None:
    assert masks(planned(blocks(), budget="100%")) == 0


def test_the_plan_file_says_what_is_packed(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert simulated(loaded).timeline.seconds == pytest.approx(plan.predicted.seconds)
    text = plan.summary()
    assert f"{masks(plan)} masks, as " in text
    assert f"{masks(plan)} masks as bits" in repr(plan)
    drawn = [graph.ops[i] for graph in plan.graphs for i in graph.packed]
    assert {op.name for op in drawn} == {"planner.draw_mask.default"}
    record = json.loads(plan.dumps())
    record["graphs"][0]["packed"] = [len(record["graphs"][0]["ops"]) - 1]
    with pytest.raises(planner.PlanFileError, match=r"packed\[0\]: operation \d+ is not a forward operation"):
        Plan.loads(json.dumps(record))
    model, plain = blocks(), blocks()
    loaded.apply(model)
    assert same_gradients(model, plain, X)


def test_what_users_insist_on_is_not_packed() -> None:
    for insisted in ({"recompute": ["aten.native_dropout"]}, {"keep": ["aten.native_dropout"]}):
        assert masks(planned(blocks(), **insisted)) == 0
    with pytest.raises(planner.PlannerError, match="encodings='bits'"):
        planned(blocks(), encodings="bits")


def same_gradients(model: nn.Module, plain: nn.Module, *inputs: torch.Tensor) -> bool:
    found = []
    for each in (model, plain):
        torch.manual_seed(5)
        each.zero_grad(set_to_none=True)
        squares(each(*inputs)).backward()
        found.append([*(p.grad for p in each.parameters()), torch.get_rng_state()])
    return all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_batches_follow_the_plan(plan: Plan) -> None:
    model, plain = blocks(), blocks()
    plan.apply(model)
    for batch in (64, 3, 17, 8):  # the sizes are traced of three rows, whose masks are too small to pack
        assert same_gradients(model, plain, torch.randn(batch, 32))
    with pytest.warns(planner.PlanWarning, match="is predicted to peak at"):
        assert same_gradients(model, plain, torch.randn(81, 32))


def test_a_frozen_layer_keeps_the_rest_packed(plan: Plan) -> None:
    model, plain = blocks(), blocks()
    for each in (model, plain):
        for parameter in each[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
    plan.apply(model)
    assert same_gradients(model, plain, X)


class Parts(nn.Module):
    """Two graphs, with dropout in both, and a mask that is no dropout's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(32), Block(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        wide = torch.cat([x, x.exp()], 1)
        return self.second(torch.where(wide.sin() > 0.1, wide.cos(), wide * 2)[:, :32])


@pytest.mark.graphs
def test_graphs_and_conditions() -> None:
    torch.manual_seed(0)
    model = Parts().train()
    plan = planned(model)
    assert {g.ops[i].name for g in plan.graphs for i in g.packed} >= {"planner.draw_mask.default"}
    report = planner.verify(model, (X,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
