"""What `explain` says is what the simulator says, on the problem that was solved and not on the plan file."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import planner
from planner.cli.commands import app
from planner.errors import PlanFileError
from planner.planfile.simulated import simulated
from planner.report.explanation import UnknownModule, explain, seconds_per_byte
from planner.training_step.user_lines import users_line
from planner.user_plan import Plan
from solvers.model.graph import Graph, Op, Phase, Value
from solvers.model.schedule import simulate
from tests.planned import planned_gpt
from tests.plans import layered_plan

LAYERS = [f"blocks.{n}" for n in range(4)]
PARTS = ["", ".widen", ".query_key_value", ".dropout"]
MODULES = ["", "blocks", "words", "head", *(layer + part for layer in LAYERS for part in PARTS)]


def _in_module(graph: Graph, module: str) -> list[int]:
    ops = graph.ops[: graph.base_length]
    return [i for i, op in enumerate(ops) if f"{op.module}.".startswith(f"{module}." if module else "")]


def _uses(graph: Graph, schedule: list[int]) -> Iterator[tuple[int, int, int]]:
    """Every use in a schedule: the value, the step that made what is used, the step that uses it."""
    made: dict[int, int] = {}
    for step, row in enumerate(schedule):
        for value in graph.ops[row].inputs:
            yield value, made[value], step
        made.update(dict.fromkeys(graph.ops[row].outputs, step))


def _without(graph: Graph, schedule: list[int], module: str) -> list[int]:
    """The schedule without re-runs of a module, taken out one by one."""
    rows = set(_in_module(graph, module))
    again = [
        i >= graph.forward_length and graph.base_of[r] < graph.forward_length for i, r in enumerate(schedule)
    ]
    left = [
        (row, a)
        for row, a in zip(schedule, again, strict=True)
        if not (a and int(graph.base_of[row]) in rows)
    ]
    while True:
        used = {made for _, made, _ in _uses(graph, [row for row, _ in left])}
        idle = [step for step, (_, a) in enumerate(left) if a and step not in used]
        if not idle:
            return [row for row, _ in left]
        left = [pair for step, pair in enumerate(left) if step not in idle]


@pytest.mark.parametrize("module", MODULES)
def test_its_claims_are_the_simulators(module: str) -> None:
    planned = planned_gpt()
    graph, schedule = planned.problem.graph, planned.schedule.tolist()
    found = planned.plan.explain(module)
    before = simulate(graph, planned.schedule)
    assert (found.binding.step, found.binding.live_bytes) == (before.peak_step, before.peak_bytes)
    rows = [i for i in _in_module(graph, module) if i < graph.forward_length]
    assert found.operations == len(rows)

    forward = graph.forward_length
    kept = {v for v, made, used in _uses(graph, schedule) if made < forward <= used}
    kept |= {v for v, x in enumerate(graph.values) if x.held_until is not None and x.held_until >= forward}
    mine = [v for v in kept if graph.producer[v] in rows]
    assert found.kept_bytes == sum(graph.values[v].bytes for v in mine)

    when = [s for s, r in enumerate(schedule) if s >= forward and int(graph.base_of[r]) in rows]
    assert sorted(step for rerun in found.reruns for step in rerun.steps) == when
    assert found.rerun_seconds == pytest.approx(sum(graph.ops[schedule[s]].seconds for s in when))
    if not when:
        assert found.keeping is None
        return
    other = _without(graph, schedule, module)
    after = simulate(graph, np.array(other))
    assert found.keeping is not None
    assert found.keeping.peak_bytes == after.peak_bytes
    assert found.keeping.peak.step == after.peak_step
    assert found.keeping.saved_seconds == pytest.approx(before.seconds - after.seconds)
    assert found.keeping.fits == (after.peak_bytes <= (found.room_bytes or 0))
    # The plan's peak is in the backward, at an operation that runs once: it is found by that.
    binding = schedule[before.peak_step]
    assert schedule.count(binding) == 1
    there = other.index(binding)
    assert found.keeping.extra_bytes == after.step_bytes[there] - before.peak_bytes


def test_modules_of_every_kind_are_among_those_that_are_checked() -> None:
    found = [planned_gpt().plan.explain(module) for module in MODULES]
    assert len(found) == 20
    assert sum(e.keeping is None for e in found) > 2
    assert sum(e.keeping is not None and not e.keeping.fits for e in found) > 2
    assert sum(e.more is not None for e in found) > 2


def test_what_more_budget_keeps_fits_it_and_saves_time() -> None:
    planned = planned_gpt()
    budget = planned.plan.target.budget_bytes
    assert budget is not None
    more = int(budget * 1.1) - planned.plan.resident.total
    for module in MODULES:
        found = planned.plan.explain(module)
        if found.more is not None:
            assert found.more.peak_bytes <= more
            assert found.more.saved_seconds > 0
            assert found.more_operations
        assert found.less_bytes == planned.plan.predicted.peak_bytes - int(budget * 0.9)


def test_what_keeping_saves_is_what_the_rerun_takes() -> None:
    graph = Graph(
        (
            Op((), (0, 1), seconds=9.0, replay=2),
            Op((0,), (2,), phase=Phase.BACKWARD),
            Op(
                (1,), (0,), seconds=2.0
            ),  # its first run draws numbers and keeps the generator's state as well
        ),
        (Value(4), Value(4, on_demand=True), Value(1)),
        base_length=2,
    )
    assert seconds_per_byte(graph, {0}, {0: 3}) == 3 * 2.0 / 4


def test_a_plan_file_simulates_as_what_was_solved() -> None:
    planned = planned_gpt()
    again = simulated(Plan.loads(planned.plan.dumps()))
    solved = simulate(planned.problem.graph, planned.schedule)
    assert again.schedule.tolist() == planned.schedule.tolist()
    assert again.timeline.step_bytes.tolist() == solved.step_bytes.tolist()
    assert again.timeline.seconds == pytest.approx(solved.seconds)


def test_lines_of_the_models_code_are_named_as_files_are_imported() -> None:
    again = simulated(planned_gpt().plan)
    lines = {again.line(row) for row in range(again.graph.forward_length)}
    assert {line.partition(":")[0] for line in lines if line} == {"tests/zoo/__init__.py"}
    assert len(lines) > 4


def test_our_own_lines_are_not_the_users() -> None:
    ours, torchs = (
        Path(planner.__file__).parent / "capture" / "capture.py",
        Path(torch.__file__).parent / "x.py",
    )
    stack = '  File "{}", line 7, in forward\n    return x\n'
    assert users_line(stack.format(ours)) is None
    assert users_line(stack.format(torchs) + stack.format(ours)) == f"{torchs}:7"
    assert users_line(stack.format("/home/me/net.py") + stack.format(ours)) == "/home/me/net.py:7"


def test_the_command_says_it_in_words_and_as_data(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned_gpt().plan.save(path)
    done = CliRunner().invoke(app, ["explain", str(path), "blocks.0"])
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    for part in (
        "blocks.0",
        "kept results of",
        "more at that moment",
        "10 % more",
        "10 % less",
        "zoo/__init__.py:",
    ):
        assert part in words
    data = CliRunner().invoke(app, ["explain", str(path), "blocks.0", "--json"])
    assert f'"extra_bytes": {planned_gpt().plan.explain("blocks.0").keeping.extra_bytes}' in data.stdout  # type: ignore[union-attr]
    assert "<pre" in planned_gpt().plan.explain("blocks.0")._repr_html_()


def test_a_module_that_is_not_there_is_named_with_ones_like_it(tmp_path: Path) -> None:
    with pytest.raises(UnknownModule, match=r"'block.1.dropout'.*blocks\.1\.dropout"):
        explain(planned_gpt().plan, "block.1.dropout")
    path = tmp_path / "plan.json"
    planned_gpt().plan.save(path)
    done = CliRunner().invoke(app, ["explain", str(path), "block.1.dropout"])
    assert done.exit_code == 2
    assert "blocks.1.dropout" in done.stderr


def test_a_plan_of_an_earlier_release_says_what_is_missing() -> None:
    with pytest.raises(PlanFileError, match="plan again"):
        explain(layered_plan(), "")


def test_a_step_that_does_not_give_the_predicted_peak_is_refused() -> None:
    plan = planned_gpt().plan
    assert plan.step is not None
    sizes = [2 * size for size in plan.step.value_bytes]
    changed = plan.model_copy(update={"step": plan.step.model_copy(update={"value_bytes": sizes})})
    with pytest.raises(PlanFileError, match="changed by hand"):
        explain(changed)
    pipeline = {"left_bytes": 2**63 - 1, "added_up": [1] * len(plan.step.ops)}
    changed = plan.model_copy(
        update={
            "step": plan.step.model_copy(update=pipeline),
            "target": plan.target.model_copy(update={"in_flight": 4}),
        }
    )
    with pytest.raises(PlanFileError, match="plan: step: "):
        explain(changed)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("reads", [10**6], "reads"),
        ("ops", [10**5], "ops"),
        ("graphs", [7], "graphs"),
        ("made_counts", [1, 2], "entries"),
        ("forward_length", 10**6, "forward_length"),
        ("executions", [1], r"step.executions\[\d+\]: 1 is not one of the 1 of graph 0"),
    ],
)
def test_a_step_that_does_not_fit_together_is_refused(field: str, value: object, words: str) -> None:
    data = planned_gpt().plan.model_dump(mode="json")
    old = data["step"][field] or [0] * len(data["step"]["ops"])
    changed = value if isinstance(value, int) else [*old[:-1], *value]  # type: ignore[misc]
    with pytest.raises(PlanFileError, match=words):
        Plan.loads(
            planned_gpt()
            .plan.model_copy(update={"step": None})
            .dumps()
            .replace('"step": null', f'"step": {json.dumps({**data["step"], field: changed})}')
        )
