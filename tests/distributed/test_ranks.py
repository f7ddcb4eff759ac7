"""What ranks compare: everything by which two plans can run differently, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest

from planner.planfile.graph_record import (
    GradientLayout,
    GraphRecord,
    OpRecord,
    Program,
    SplitRecord,
    SplitRun,
)
from planner.runtime.ddp import RankCheck, decisions_digest
from tests.plans import layered_plan

PLAN = layered_plan(layers=2, kept_layers=1)
GRAPH = PLAN.graphs[0]

OTHER: dict[str, Any] = {
    "structure": "6" * 64,
    "occurrence": 1,
    "occurrences": 2,
    "unused_outputs": [1],
    "per_use_inputs": [0],
    "handed_inputs": [0],
    "gradient_layouts": [GradientLayout(output=0, dimensions=[1, 0])],
    "split": SplitRecord(form="forward", pieces=2, runs=[SplitRun(module="head", rows=4)]),
    "backward": [index for index in GRAPH.backward if index >= GRAPH.forward_length],
    "other_programs": [Program(backward=GRAPH.backward)],
    "packed": [0],
    "completed": [0],
    "executions": [0, 0],
    "emitted": ["forward", "backward"],
    "ops": [op.model_copy(update={"name": "aten.relu.default"}) for op in GRAPH.ops],
}
"""By field of a graph's record, another value for it."""
SAYS_NOTHING = {"fingerprint": "e" * 64, "kept": [], "places": []}
"""Fields that nothing that runs depends on."""


@pytest.mark.parametrize("field", sorted({*GraphRecord.model_fields} - SAYS_NOTHING.keys()))
def test_ranks_that_run_differently_have_other_digests(field: str) -> None:
    assert field in OTHER, f"a test is missing: does {field} decide what runs?"
    other = PLAN.model_copy(update={"graphs": [GRAPH.model_copy(update={field: OTHER[field]})]})
    assert decisions_digest(other) != decisions_digest(PLAN)


@pytest.mark.parametrize("field", sorted({*OpRecord.model_fields} - {"bytes", "seconds"}))
def test_other_operations_have_other_digests(field: str) -> None:
    ops = [op.model_copy(update={field: "backward" if field == "phase" else "other"}) for op in GRAPH.ops]
    other = PLAN.model_copy(update={"graphs": [GRAPH.model_copy(update={"ops": ops})]})
    assert decisions_digest(other) != decisions_digest(PLAN)


def test_plans_that_run_the_same_have_one_digest() -> None:
    ops = [op.model_copy(update={"bytes": 1, "seconds": 2.0}) for op in GRAPH.ops]
    graph = GRAPH.model_copy(update={**SAYS_NOTHING, "ops": ops})
    programs = [[Program(backward=GRAPH.backward, kept=kept)] for kept in ([], [0])]
    first, second = (GRAPH.model_copy(update={"other_programs": others}) for others in programs)
    assert decisions_digest(PLAN.model_copy(update={"graphs": [first]})) == decisions_digest(
        PLAN.model_copy(update={"graphs": [second]})
    )
    solver = PLAN.solver.model_copy(update={"name": "chain", "solve_seconds": 9.0})
    other = PLAN.model_copy(update={"graphs": [graph], "solver": solver, "notes": ["a note"]})
    assert decisions_digest(other) == decisions_digest(PLAN)


def test_what_else_decides_counts_too() -> None:
    evaluated = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"training": False})})
    larger = [tensor.model_copy(update={"shape": [16, 128]}) for tensor in PLAN.model.inputs]
    other_shapes = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"inputs": larger})})
    richer = PLAN.model_copy(update={"target": PLAN.target.model_copy(update={"budget_bytes": 2**40})})
    on_disk = PLAN.model_copy(update={"target": PLAN.target.model_copy(update={"offload": "disk"})})
    assert decisions_digest(evaluated) != decisions_digest(PLAN)
    assert decisions_digest(on_disk) != decisions_digest(PLAN)
    assert decisions_digest(PLAN.model_copy(update={"coverage": "several-graphs"})) != decisions_digest(PLAN)
    assert len({decisions_digest(PLAN, policy) for policy in ("reapply", "replan", "error")}) == 3
    assert decisions_digest(other_shapes) == decisions_digest(PLAN)
    for policy in ("replan", "error"):
        assert decisions_digest(other_shapes, policy) != decisions_digest(PLAN, policy)
    assert decisions_digest(richer) == decisions_digest(PLAN)
    assert decisions_digest(richer, "replan") != decisions_digest(PLAN, "replan")


def test_each_group_of_ranks_counts_its_own_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of one group alone would wait for others under another name."""
    written: list[str] = []
    store = SimpleNamespace(
        set=lambda name, _: written.append(name),
        wait=lambda *_: None,
        get=lambda _: decisions_digest(PLAN).encode(),
    )
    monkeypatch.setattr("planner._torch.distributed.default_store", lambda: store)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    for ranks in ([0, 71], [0, 72], [0, 71]):
        RankCheck(PLAN)._compare(ranks)
    assert written == ["planner/0-71/0/0", "planner/0-72/0/0", "planner/0-71/1/0"]
