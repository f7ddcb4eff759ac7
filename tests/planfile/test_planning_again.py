"""Planning again gives the same file, and the file has one line an operation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner.planfile.json_layout import laid_out
from planner.user_plan import Plan
from tests.plans import layered_plan
from tests.small import layers_with_graph_breaks

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_the_same_step_gives_the_same_file() -> None:
    def text() -> str:
        model, args, kwargs = layers_with_graph_breaks()
        plan = planner.plan(model, args, kwargs, budget="min", optimizer="adamw", solver="sqrt_n")
        return plan.dumps()

    first = text()
    assert first == text()
    assert "solve_seconds" not in first
    assert "capture_seconds" not in first


_SCRIPT = """
import sys, planner
from tests.small import layers_with_graph_breaks
model, args, kwargs = layers_with_graph_breaks()
planner.plan(model, args, kwargs, budget="min", solver="auto").save(sys.argv[1])
"""


@pytest.mark.heavy
def test_another_process_writes_the_same_file(tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        path = tmp_path / f"plan-{seed}.json"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", _SCRIPT, str(path)], check=True, env=environment, cwd=ROOT)
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_every_operation_is_one_line_however_long_its_module_is() -> None:
    plan = layered_plan()
    record = plan.graphs[0].ops[3].model_copy(update={"module": "model." + "decoder." * 30 + "linear"})
    graph = plan.graphs[0].model_copy(update={"ops": [record, *plan.graphs[0].ops[1:]]})
    text = plan.model_copy(update={"graphs": [graph]}).dumps()
    lines = [json.loads(line.strip().rstrip(",")) for line in text.splitlines() if '"phase"' in line]
    assert len(lines) == len(graph.ops)
    assert [line["name"] for line in lines] == [op.name for op in graph.ops]
    assert Plan.loads(text).graphs[0].ops == graph.ops


def test_lists_of_other_things_are_laid_out_as_before() -> None:
    text = laid_out({"inputs": [{"path": "x" * 120, "shape": [1, 2]}], "notes": ["a" * 200, "b"]})
    assert json.loads(text) == {"inputs": [{"path": "x" * 120, "shape": [1, 2]}], "notes": ["a" * 200, "b"]}
    assert len(text.splitlines()) > 6


def test_how_long_planning_took_is_known_and_does_not_count() -> None:
    plan = layered_plan()
    assert plan.solver.solve_seconds == 0.2
    read = Plan.loads(plan.dumps())
    assert read == plan
    assert read.solver.solve_seconds is None
    assert hash(read.solver) == hash(plan.solver)
    slower = plan.solver.model_copy(update={"status": "time-limit"})
    assert plan.model_copy(update={"solver": slower}) != plan


def test_files_that_hold_the_times_are_read() -> None:
    data = json.loads(layered_plan().dumps())
    data["solver"] |= {"solve_seconds": 1.5, "capture_seconds": 2.5}
    assert Plan.loads(json.dumps(data)).solver.capture_seconds == 2.5
