"""Plans as text and as figures."""

import io
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

import planner
from planner.errors import printable
from planner.planfile.plan import LiveModule
from planner.report import figure
from planner.report.frontier import render_frontier
from planner.report.modules import folded_holders, folded_names, module_rows
from planner.report.text import format_seconds, module_table, render, timeline_chart
from planner.report.verification import render_verification
from planner.user_plan import Plan
from tests.plans import LAYER_OPS, MIB, layered_plan


def _text(what: object, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(what)
    return out.getvalue()


def test_the_report_says_what_matters() -> None:
    text = _text(render(layered_plan(), width=100))
    for words in (
        "zoo.GPT",
        "8x128",
        "60%",
        "+10.0%",
        "sqrt_n",
        "141.0 MiB (100%)",
        "101.0 MiB (72%)",
        "budget",
    ):
        assert words in text
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())


def test_layers_that_are_treated_alike_share_a_line() -> None:
    rows = module_rows(layered_plan(layers=6, kept_layers=2))
    names = {row.name: row for row in rows}
    assert names["[0-3]"].count == 4
    assert names["[0-3]"].share.recomputed_ops == 4 * (len(LAYER_OPS) - 1)
    assert names["[0-3]"].share.recomputed_bytes == 4 * (len(LAYER_OPS) - 1) * MIB
    assert names["[4-5]"].share.recomputed_ops == 0
    # Nothing is said of what is in layers that are kept whole.
    assert [row.name for row in rows[-3:]] == ["[4-5]", "tokens", "(itself)"]


def test_alike_layers_need_not_be_neighbours() -> None:
    plan = layered_plan(layers=6, kept_layers=2)
    graph = plan.graphs[0]
    # Layer 2 is kept as well.
    second = range(1 + 2 * len(LAYER_OPS), 1 + 3 * len(LAYER_OPS))
    backward = [op for op in graph.backward if op not in second]
    changed = plan.model_copy(
        update={"graphs": [graph.model_copy(update={"backward": backward, "kept": []})]}
    )
    names = {row.name: row.count for row in module_rows(changed)}
    assert names["[0-1, 3]"] == 3
    assert "[2, 4-5]" in names


def test_the_first_line_is_the_whole_model() -> None:
    plan = layered_plan()
    first = module_rows(plan)[0]
    graph = plan.graphs[0]
    assert first.share.ops == graph.forward_length
    assert first.share.recomputed_ops == len(graph.recomputed)
    assert first.share.kept_bytes == len(graph.kept) * MIB


def test_a_long_table_is_cut() -> None:
    plan = layered_plan(layers=14, kept_layers=0)
    graph = plan.graphs[0]
    ops = [
        op.model_copy(update={"module": f"part{index}"}) if op.phase == "forward" else op
        for index, op in enumerate(graph.ops)
    ]
    many = plan.model_copy(update={"graphs": [graph.model_copy(update={"ops": ops})]})
    rows = len(module_rows(many))
    lines = _text(module_table(many)).splitlines()
    assert rows > 90
    assert len(lines) == 82
    assert f"{rows - 80} more lines" in lines[-1]


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("budget_text", ["60%", "min"])
def test_the_chart_fits_and_shows_the_budget(width: int, budget_text: str) -> None:
    chart = timeline_chart(layered_plan(budget_text=budget_text), width=width).plain
    assert all(len(line) <= max(width, 70) for line in chart.splitlines())
    assert ("─ budget" in chart) == (budget_text != "min")
    assert "█" in chart
    assert "backward" in chart


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0 ns"), (3e-9, "3 ns"), (1.5e-5, "15 us"), (0.0123, "12.3 ms"), (1234.0, "1234 s")],
)
def test_times_for_people(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_names_cannot_move_the_cursor_or_colour_the_text() -> None:
    plan = layered_plan()
    nasty = "\x1b[2J[red]layer[/red]\n"
    model = plan.model.model_copy(update={"class_name": nasty})
    holders = [LiveModule(module=nasty, bytes=5)]
    text = _text(render(plan.model_copy(update={"model": model, "peak_holders": holders, "notes": [nasty]})))
    assert "\x1b" not in text
    assert text.count("[red]layer[/red]") == 3
    assert printable(nasty) == r"\x1b[2J[red]layer[/red]\n"


def test_a_plan_without_recomputation_is_one_line() -> None:
    rows = module_rows(layered_plan(layers=3, kept_layers=3))
    assert [row.name for row in rows] == ["(the model)"]


@pytest.mark.parametrize("ending", figure.FORMATS)
def test_figures_are_written_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    figure.save(layered_plan(), path)
    assert path.stat().st_size > 1000
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_same_plan_draws_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        figure.save(layered_plan(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_odd_names_are_drawn(tmp_path: Path) -> None:
    plan = layered_plan(budget_text="min").model_copy(
        update={"peak_holders": [LiveModule(module=f"$\\frac{n}$", bytes=5) for n in range(20)]}
    )
    figure.save(plan, tmp_path / "plan.png")


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(planner.PlannerError, match=r"plan\.txt.*\.svg"):
        figure.check_figure("plan.txt")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(planner.PlannerError, match=r"torch-checkpoint-planner\[plot\]"):
        figure.draw(layered_plan())


@dataclass
class _Verified:
    ok: bool = True
    loss_equal: bool = True
    gradients_equal: bool = True
    buffers_equal: bool = True
    rng_equal: bool = True
    measured_dynamic_peak_bytes: int = 99 * MIB
    predicted_dynamic_peak_bytes: int = 100 * MIB
    baseline_measured_dynamic_peak_bytes: int = 200 * MIB
    baseline_predicted_dynamic_peak_bytes: int = 200 * MIB
    seconds: float = 1.1
    baseline_seconds: float = 1.0
    overhead: float = 0.1
    overheads: list[float] = field(default_factory=lambda: [0.12, 0.02, 0.3])
    problems: list[str] = field(default_factory=list)
    unsplit_bytes: int = 0
    baseline_unsplit_bytes: int = 0


def test_what_the_allocator_counts_more_is_said() -> None:
    assert "max_memory_allocated" not in _text(render_verification(_Verified()))
    more = _text(render_verification(_Verified(unsplit_bytes=3 * MIB)))
    assert "max_memory_allocated counts 0 B and 3.0 MiB more" in more


def test_a_verification_shows_both_peaks_and_its_problems() -> None:
    good = _text(render_verification(_Verified()))
    for words in ("verified", "gradients equal", "99.0 MiB", "0.9900", "+10.0% (+2.0% to +30.0% in 3 pairs"):
        assert words in good
    bad = _text(render_verification(_Verified(ok=False, buffers_equal=False, problems=["buffers: bn.mean"])))
    for words in ("NOT VERIFIED", "buffers DIFFER", "problem: buffers: bn.mean"):
        assert words in bad


def test_a_loaded_plan_shows_as_the_one_saved() -> None:
    plan = layered_plan()
    unknown = {"solve_seconds": None, "capture_seconds": None}  # not in the file
    solver = plan.solver.model_copy(update=unknown)
    expected = _text(render(plan.model_copy(update={"solver": solver})))
    assert _text(render(Plan.loads(plan.dumps()))) == expected


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_reports_fit_narrow_terminals_with_whole_labels(width: int) -> None:
    plans = [layered_plan(), layered_plan(kept_layers=4)]
    reports = {
        "plan": (render(plans[0], width=width), ["peak", "  of the step", "(the model)", "(itself)"]),
        "frontier": (render_frontier(plans, width=width), ["101.0 MiB"]),
        "verification": (render_verification(_Verified(), width=width), ["unplanned", "planned"]),
    }
    for name, (report, labels) in reports.items():
        lines = _text(report, width=width).splitlines()
        if width >= 60 or name != "plan":  # the chart's legend is wider
            assert all(len(line.rstrip()) <= width for line in lines), name
        for label in labels:
            assert any(line.lstrip().startswith(label.strip()) for line in lines), (name, label)
        assert not any("…" in line for line in lines), name


def test_the_spread_of_the_extra_time_is_reported() -> None:
    few = _Verified(overheads=[0.1])
    assert "+10.0% (one pair of steps" in _text(render_verification(few))
    assert "no time was measured" in _text(render_verification(_Verified(overheads=[])))


def test_a_module_may_be_named_by_a_star_and_modules_may_lie_in_a_thousand_others() -> None:
    assert folded_names(["layers.1", "layers.*"]) == ["layers.*"]
    plan = layered_plan()
    holders = [LiveModule(module=f"layers.{name}", bytes=MIB) for name in ("*", "1")]
    (folded,) = folded_holders(plan.model_copy(update={"peak_holders": holders}), 9)
    assert folded == LiveModule(module="layers.* x2", bytes=2 * MIB)
    (graph,) = plan.graphs
    ops = [op.model_copy(update={"module": ".".join(["1"] * (20 * i + 1))}) for i, op in enumerate(graph.ops)]
    deep = plan.model_copy(update={"graphs": [graph.model_copy(update={"ops": ops})]})
    assert sum(row.share.ops for row in module_rows(deep)[:1]) == graph.forward_length
