"""A plan in a console and in a notebook."""

import pytest

import planner
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
    assert html.startswith("<pre")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "live bytes over the step" in html


def test_its_figure() -> None:
    pytest.importorskip("matplotlib")
    figure = layered_plan().figure()
    assert len(figure.axes) == 2


def test_bytes_for_people_are_public() -> None:
    assert planner.format_bytes(3 * 2**20) == "3.0 MiB"
    assert "format_bytes" in planner.__all__
