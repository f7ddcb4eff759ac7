"""The page of a plan: its data without a browser, and the page itself in Chromium."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.reports import look_at
from planner.cli.commands import app
from planner.errors import PlanFileError
from planner.planfile.budget import format_bytes
from planner.planfile.simulated import simulated
from planner.report.page.data import FrontierError, _groups, page_data
from planner.report.undroppable import peak_parts
from planner.user_plan import Plan
from solvers.model.graph import Phase
from solvers.model.just_in_time import recompute
from solvers.model.schedule import alive_at, simulate
from tests.browser import run_in_browser
from tests.planned import planned_gpt
from tests.plans import layered_plan


@pytest.mark.heavy
def test_its_figures_are_those_of_the_simulated_plan() -> None:
    planned = planned_gpt()
    graph, timeline = planned.problem.graph, simulate(planned.problem.graph, planned.schedule)
    data = page_data(planned.plan)
    assert data["live"] == timeline.step_bytes.tolist()
    assert data["peak"] == {"step": timeline.peak_step, "bytes": timeline.peak_bytes}
    assert data["link"] == []
    assert data["schedule"] == graph.base_of[planned.schedule].tolist()
    values = {name: np.array(column) for name, column in data["values"].items()}
    for step in (0, graph.forward_length, timeline.peak_step, len(planned.schedule) - 1):
        alive = (values["start"] <= step) & (step <= values["end"])
        expected = alive_at(graph, planned.schedule, step)
        assert values["bytes"][alive].sum() == graph.bytes[expected].sum() == timeline.live_bytes[step]
    reruns = sum(len(r.steps) for r in planned.plan.explain().reruns)
    assert sum(data["ops"]["runs"]) == reruns
    assert sum(data["ops"]["kept"]) == planned.plan.explain().kept_bytes
    assert len(data["groups"]) == max(data["ops"]["group"]) + 1
    assert json.loads(json.dumps(data)) == data


def test_the_words_name_the_peak_and_what_no_plan_can_drop() -> None:
    plan = planned_gpt().plan
    words = " ".join(page_data(plan)["story"])
    parts = peak_parts(simulated(plan))
    assert parts.undroppable_bytes + parts.kept_bytes == parts.total_bytes
    for text in (
        f"{format_bytes(parts.undroppable_bytes)} of the {format_bytes(plan.predicted.dynamic_peak_bytes)}",
        "aten.mm of blocks.3.narrow in the backward",
        f"{len(plan.explain().reruns)} of {plan.explain().operations} operations",
    ):
        assert text in words


def test_what_no_plan_can_drop_is_there_in_other_plans_too() -> None:
    planned = planned_gpt()
    graph = planned.problem.graph
    sim = simulated(planned.plan)
    parts = peak_parts(sim)
    row = int(sim.schedule[sim.timeline.peak_step])
    assert row >= graph.forward_length  # an operation that every schedule runs once
    random = np.random.default_rng(0)
    masks = [random.random(len(graph.values)) < share for share in (0.0, 0.3, 0.7)]
    # All of the last layers, where the peak is, and nothing of the others: less than the plan holds there.
    masks.append(graph.producer > 0.8 * graph.forward_length)
    live = []
    for kept in masks:
        other = recompute(graph, kept)
        live.append(int(simulate(graph, other).step_bytes[np.flatnonzero(other == row)[0]]))
    assert 0 < parts.undroppable_bytes <= min(live) < parts.total_bytes


def test_it_is_one_file_that_asks_nothing_of_a_network(tmp_path: Path) -> None:
    path, plan_path = tmp_path / "report.html", tmp_path / "plan.json"
    planned_gpt().plan.save(plan_path)
    done = CliRunner().invoke(app, ["report", str(plan_path), "-o", str(path), "--frontier", str(plan_path)])
    assert done.exit_code == 0, done.output
    text = path.read_text()
    assert text == planned_gpt().plan.report(frontier=[planned_gpt().plan])
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?https?:", text)
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert len(text) < 2**20


def test_names_cannot_inject_anything() -> None:
    plan = planned_gpt().plan
    record = plan.graphs[0]
    evil = "</script><script>alert(1)</script><!--"
    ops = [op.model_copy(update={"module": evil}) for op in record.ops]
    model = plan.model.model_copy(update={"class_name": evil})
    graphs = [record.model_copy(update={"ops": ops})]
    text = plan.model_copy(update={"model": model, "graphs": graphs}).report()
    assert "<script>alert" not in text
    assert text.count("</script>") == 3


def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="plan again"):
        layered_plan().report()
    with pytest.raises(FrontierError, match=r"zoo\.GPT"):
        planned_gpt().plan.report(frontier=[layered_plan()])
    with pytest.raises(PlanFileError, match="there is no directory"):
        planned_gpt().plan.report(tmp_path / "none" / "report.html")


LOOK = """
const text = id => document.getElementById(id).textContent;
const found = { ready: document.documentElement.dataset.ready };
found.peak = { ...document.getElementById("moment").dataset };
found.story = text("story");
const over = document.querySelector("#chart .u-over"), box = over.getBoundingClientRect();
const move = x => over.dispatchEvent(new MouseEvent("mousemove",
  { clientX: box.left + x * box.width, clientY: box.top + 40, bubbles: true }));
over.dispatchEvent(new MouseEvent("mouseenter", { clientX: box.left, clientY: box.top + 40 }));
move(0.2);
await new Promise(done => setTimeout(done, 300));
found.hovered = { ...document.getElementById("moment").dataset };
found.alive = [...document.getElementById("alive").tBodies[0].rows].length;
const chart = document.getElementById("chart");
const key = k => chart.dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true }));
key("End"); found.end = document.getElementById("moment").dataset.step;
key("p"); found.back = document.getElementById("moment").dataset.step;
key("+"); found.zoomed = view[1] - view[0];
const search = document.getElementById("search");
search.value = "gelu re-run"; search.dispatchEvent(new Event("input"));
await new Promise(done => setTimeout(done, 400));
found.search = text("count");
search.value = ""; search.dispatchEvent(new Event("input"));
await new Promise(done => setTimeout(done, 400));
document.getElementById("ops").tHead.querySelectorAll("button")[4].click();
found.largest = document.getElementById("ops").tBodies[0].rows[0].cells[4].textContent;
found.root = [...document.getElementById("modules").tBodies[0].rows[0].cells].map(c => c.textContent);
document.getElementById("theme").click();
found.theme = document.documentElement.dataset.theme;
found.wide = document.documentElement.scrollWidth <= innerWidth;
found.unread = document.querySelectorAll("#frontier canvas").length;
return JSON.stringify(found);
"""


@pytest.mark.browser
def test_it_works_in_a_browser(tmp_path: Path) -> None:
    plan = planned_gpt().plan
    data = page_data(plan)
    seen = run_in_browser(plan.report(frontier=[plan]), LOOK, tmp_path)
    assert seen.console == []
    assert not seen.result.startswith("FAILED"), seen.result
    found = json.loads(seen.result)
    assert found["ready"] == "yes"
    assert found["peak"] == {"step": str(data["peak"]["step"]), "bytes": str(data["peak"]["bytes"])}
    assert data["story"][0] in found["story"]
    step = int(found["hovered"]["step"])
    assert 0.1 * len(data["live"]) < step < 0.3 * len(data["live"])
    assert int(found["hovered"]["bytes"]) == data["live"][step]
    assert found["alive"] > 3
    assert found["end"] == str(len(data["live"]) - 1)
    assert found["back"] == str(data["peak"]["step"])
    assert found["zoomed"] < len(data["live"]) / 2
    gelu = [r for r in plan.explain().reruns if "gelu" in r.operation]
    assert gelu
    assert found["search"] == f"1-{len(gelu)} of {len(gelu)} operations"
    assert found["largest"] == format_bytes(max(data["ops"]["bytes"]))
    whole = plan.explain()
    assert found["root"][1:4] == [
        str(whole.operations),
        str(len(whole.reruns)),
        format_bytes(whole.kept_bytes),
    ]
    assert found["theme"] == "dark"
    assert found["wide"]
    assert found["unread"] == 1


@pytest.mark.browser
def test_a_plan_that_was_not_planned_for_a_budget_shows_as_well(tmp_path: Path) -> None:
    plan = planned_gpt().plan
    target = plan.target.model_copy(update={"budget_bytes": None, "budget_text": "min"})
    least = Plan.loads(plan.model_copy(update={"target": target}).dumps())
    seen = run_in_browser(least.report(), "return document.getElementById('legend').textContent", tmp_path)
    assert seen.console == []
    assert "planned, at most" in seen.result
    assert "budget" not in seen.result


@pytest.mark.heavy
@pytest.mark.browser
def test_what_is_wrong_with_a_report_is_seen_when_it_is_measured(tmp_path: Path) -> None:
    plan, path = planned_gpt().plan, tmp_path / "report.html"
    # Long names, as of files, may not make a page wider than a narrow window.
    text = plan.report().replace("zoo/__init__.py", f"{'long' * 15}.py")
    path.write_text(text)
    seen = look_at(plan, path, times=2, pictures=str(tmp_path / "seen"))
    assert not [problem for problem in seen.problems if "first paint" not in problem]
    assert min(seen.paint_seconds) > 0
    assert len(seen.drawn_seconds) == 2
    light, dark = ((tmp_path / name).read_bytes() for name in ("seen.png", "seen-dark.png"))
    assert light.startswith(b"\x89PNG")
    assert light != dark
    peak = str(plan.predicted.dynamic_peak_bytes)
    wrong = "<p style='width: 90rem'>wide</p><script>console.error('no good'); fetch('http://127.0.0.1:9/')</script>"
    path.write_text(text.replace("</body>", wrong + "</body>").replace(peak, "1" + peak))
    problems = " ".join(look_at(plan, path, times=1).problems)
    for part in ("no good", "http://127.0.0.1:9/", "wider than", f"the peak is 1{peak} in the page"):
        assert part in problems


def test_few_bytes_are_left_to_other_modules() -> None:
    """Where no six modules have most bytes, as in deep trees, they are told apart less finely."""
    plan = planned_gpt().plan
    record = plan.graphs[0]
    deep = [
        op.model_copy(update={"module": f"{op.module}.{'abcdefghijklmnop'[i % 16]}"})
        for i, op in enumerate(record.ops)
    ]
    data = page_data(plan.model_copy(update={"graphs": [record.model_copy(update={"ops": deep})]}))
    area: Counter[str] = Counter()
    values = data["values"]
    for op, size, start, end in zip(*(values[k] for k in ("op", "bytes", "start", "end")), strict=True):
        if op < data["forward"]:
            area[data["groups"][data["ops"]["group"][op]]] += size * (end - start + 1)
    assert area["other modules"] < 0.2 * area.total()


def test_a_step_without_a_forward_has_no_groups_of_modules() -> None:
    plan = planned_gpt().plan
    assert plan.step is not None
    sim = simulated(plan)
    backward = replace(
        sim,
        graph=replace(
            sim.graph,
            ops=tuple(replace(op, phase=Phase.BACKWARD, recomputable=False) for op in sim.graph.ops),
        ),
    )
    assert set(_groups(backward)[1]) == {0}
