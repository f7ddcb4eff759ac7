"""A plan in a console and in a notebook."""

import re
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import planner
from planner.planning.make_plan import failed
from planner.report.difference import render_difference
from planner.report.figure import save
from planner.report.modules import folded_holders
from tests.planned import planned_gpt
from tests.plans import layered_plan


def test_its_repr_is_one_short_line() -> None:
    plan = layered_plan(layers=200)
    for text in (repr(plan), str(plan), f"{plan}"):
        assert len(text) < 300
        assert "\n" not in text
        for word in ("zoo.GPT", "60%", "GiB", "+10.0%", "re-runs 1386 of 1602"):
            assert word in text
    assert len(repr(plan.graphs)) < 200
    assert len(repr(plan.timeline)) < 100


def test_what_could_not_be_measured_is_named() -> None:
    one = {"aten.mm.default(float32[2, 2](2, 1))": "RuntimeError: no kernel"}
    assert "of 1 operation could not be measured" in failed(one)
    assert "counts as 0 (aten.mm.default: RuntimeError: no kernel)" in failed(one)
    two = failed({**one, "aten.add.Tensor()": "TypeError"})
    assert "of 2 operations" in two
    assert "the first is aten.mm.default" in two


def test_its_summary_is_what_the_command_line_shows() -> None:
    plan = layered_plan()
    text = plan.summary()
    assert 8 < len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) <= 100
    for word in ("zoo.GPT", "unplanned", "planned", "sqrt_n", "[0-3] x4", "re-run"):
        assert word in text
    assert "\x1b" not in text


def test_a_notebook_shows_it_and_names_cannot_inject_anything() -> None:
    plan = layered_plan()
    model = plan.model.model_copy(update={"class_name": "<script>alert(1)</script>"})
    html = plan.model_copy(update={"model": model})._repr_html_()
    assert html.startswith("<svg")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    drawn = ElementTree.fromstring(html[: html.index("</svg>") + 6])
    words = "".join(drawn.itertext())
    for size in (plan.baseline.dynamic_peak_bytes, plan.predicted.dynamic_peak_bytes):
        assert planner.format_bytes(size) in words
    paths = [path.get("d", "") for path in drawn.iter("path")]
    # A step for each point of a timeline, and the planned one below the unplanned one.
    assert [path.count("V") for path in paths[:2]] == [
        len(plan.baseline_timeline.bytes),
        len(plan.timeline.bytes) + 1,
    ]
    highest = [min(map(float, re.findall(r"V ([0-9.]+)", path))) for path in paths[:2]]
    assert highest[0] < highest[1]
    assert "<pre" in html


def test_its_figure() -> None:
    pytest.importorskip("matplotlib")
    figure = layered_plan().figure()
    assert len(figure.axes) == 2


def test_bytes_for_people_are_public() -> None:
    assert planner.format_bytes(3 * 2**20) == "3.0 MiB"
    assert "format_bytes" in planner.__all__


def test_what_the_model_itself_computes_is_named_by_its_operations() -> None:
    plan = planned_gpt().plan
    shown = folded_holders(plan, 40)
    assert any(holder.module == "" for holder in plan.peak_holders)
    assert not any("(the model)" in holder.module for holder in shown)
    assert any(holder.module.endswith("mm") or "loss" in holder.module for holder in shown)
    assert sum(holder.bytes for holder in shown) == sum(holder.bytes for holder in plan.peak_holders)


def test_a_vector_figure_has_colours_for_dark_pages(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    save(layered_plan(), path)
    text = path.read_text()
    rules = re.findall(r'\[style\*="(fill|stroke): (#[0-9a-f]{6})"\]', text)
    assert "prefers-color-scheme: dark" in text
    assert {colour for _, colour in rules} >= {"#1b1f24", "#ffffff"}
    # Ink and paper, without which a dark figure could not be read, are there to be replaced.
    drawn = text.partition("<defs>")[2]
    assert "fill: #1b1f24" in drawn
    assert "fill: #ffffff" in drawn
    ElementTree.fromstring(text)


@pytest.mark.parametrize("width", [80, 100])
def test_two_plans_side_by_side_have_whole_labels(width: int) -> None:
    made_with = {"planner": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}
    plan = layered_plan().model_copy(update={"created_with": made_with})
    console = Console(width=width, record=True, file=StringIO())
    console.print(render_difference(plan, plan, ("one.json", "two.json"), width=width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for label in ("unplanned peak", "re-run operations", "made with"):
        assert any(line.startswith(label) for line in lines)
