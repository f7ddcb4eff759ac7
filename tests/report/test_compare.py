"""Plans side by side, and beside what PyTorch offers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from typer.testing import CliRunner

import planner
from planner.cli.commands import app
from planner.estimation import comparison
from planner.estimation.comparison import ComparisonError, block_names
from planner.planfile.budget import format_bytes
from planner.planning.options import OptionError
from planner.planning.solve import SolverError
from planner.report.difference import Treatment, difference, different_modules
from planner.report.figure import draw_frontier
from planner.user_plan import Plan
from tests.planned import planned_gpt
from tests.plans import MIB, layered_plan
from tests.small import small_gpt

pytestmark = pytest.mark.heavy


def test_the_modules_that_two_plans_treat_differently_are_listed() -> None:
    few, more = layered_plan(kept_layers=1), layered_plan(kept_layers=3)
    found = {row.module: row for row in different_modules(few, more)}
    assert set(found) == {
        f"model.layers.*.{name}" for name in ("norm1", "qkv", "attention", "out", "up", "gelu")
    }
    row = found["model.layers.*.attention"]
    assert row.count == 2  # layers 3 and 4
    assert (row.first.kept_bytes, row.second.kept_bytes) == (0, 2 * MIB)
    assert (row.first.rerun_ops, row.second.rerun_ops) == (2, 0)
    assert row.first.rerun_seconds == pytest.approx(0.002)
    assert different_modules(few, few) == []


def test_diff_in_a_terminal(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    layered_plan(kept_layers=1).save(paths[0])
    layered_plan(kept_layers=3).save(paths[1])
    done = CliRunner().invoke(app, ["diff", *map(str, paths)])
    assert done.exit_code == 0, done.output
    for word in ("a.json", "b.json", "model.layers.*.attention x2", "2.0 MiB", "re-run operations"):
        assert word in done.stdout
    assert "different models" not in done.stdout
    data = CliRunner().invoke(app, ["diff", *map(str, paths), "--json"])
    assert json.loads(data.stdout) == json.loads(
        json.dumps(difference(layered_plan(kept_layers=1), layered_plan(kept_layers=3)))
    )
    same = CliRunner().invoke(app, ["diff", str(paths[0]), str(paths[0])])
    assert "the same of every module" in same.stdout


def test_plans_of_different_models_say_so(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    layered_plan().save(paths[0])
    planned_gpt().plan.save(paths[1])
    assert "different models" in CliRunner().invoke(app, ["diff", *map(str, paths)]).stdout


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    net = nn.Module()
    net.layers, net.head = nn.ModuleList([inner, nn.Linear(2, 2)]), nn.Linear(2, 2)
    net.heads = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert block_names(net) == ["layers.0", "layers.1", "heads.0", "heads.2"]
    assert block_names(inner) == ["0", "2"]
    assert block_names(nn.Linear(2, 2)) == []


def test_what_is_predicted_is_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RATIOS", (0.5,))
    model, args, kwargs = small_gpt()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = planner.compare(
        model, args, kwargs, budget="60%", solvers=["sqrt_n", "none"], blocks=["blocks.*"], measure=True
    )
    names = [way.name for way in found.ways]
    assert names[0] == "unplanned"
    assert "planner, sqrt_n" in names
    assert "torch.utils.checkpoint of blocks.*" in names
    by_name = {way.name: way for way in found.ways}
    for way in found.ways:
        if way.peak_bytes is not None:
            assert way.measured_peak_bytes == way.peak_bytes
            assert way.overhead is not None
            assert way.measured_overhead is not None
    planned, compiled = by_name["planner, sqrt_n"], found.ways[-1]
    assert planned.fits
    assert not by_name["unplanned"].fits
    assert not by_name["planner, none"].fits
    assert "at least" in by_name["planner, none"].note
    assert "activation_memory_budget=0.5" in compiled.name
    assert compiled.peak_bytes is None
    assert compiled.measured_peak_bytes
    assert format_bytes(planned.peak_bytes or 0) in str(found)
    # The model is as it was: all was run on copies.
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all((weights[name] == value).all() for name, value in model.state_dict().items())


def test_gradients_that_are_there_count_as_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> tuple[int, float]:
        raise AssertionError

    monkeypatch.setattr(comparison, "RATIOS", ())
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    args = (torch.randn(4, 64),)
    model(*args).sum().backward()
    given: dict[str, Any] = {"budget": "100%", "solvers": "none", "measure": True, "loss": torch.sum}
    row = planner.compare(model, args, **given).ways[0]
    assert row.measured_peak_bytes == row.peak_bytes
    monkeypatch.setattr(comparison, "_measure", failing)
    assert planner.compare(model, args, blocks="0", **given).ways[0].note == "AssertionError: "


def test_what_cannot_be_compared_is_refused_before_the_long_work() -> None:
    model, args, kwargs = small_gpt()
    with pytest.raises(SolverError, match="magic"):
        planner.compare(model, args, kwargs, budget="60%", solvers=["magic"])
    with pytest.raises(ComparisonError, match="device"):
        planner.compare(model, args, kwargs, budget="60%", measure=True, device="A100-80GB")
    with pytest.raises(planner.BudgetError):
        planner.compare(model, args, kwargs, budget="much")
    with pytest.raises(OptionError, match="time_limit=nan"):
        planner.compare(model, args, kwargs, budget="60%", time_limit=float("nan"))
    with pytest.raises(OptionError, match="progress=5"):
        planner.compare(model, args, kwargs, budget="60%", progress=5)  # type: ignore[arg-type]


def test_a_sweep_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [layered_plan(kept_layers=n) for n in (1, 3)]
    monkeypatch.setattr(planner, "sweep", lambda *_, **__: plans, raising=False)
    builder = tmp_path / "net.py"
    builder.write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    path = tmp_path / "frontier.svg"
    done = CliRunner().invoke(app, ["sweep", f"{builder}:build", "--figure", str(path)])
    assert done.exit_code == 0, done.output
    assert "<svg" in path.read_text()
    axes = draw_frontier(plans).axes[0]
    peaks, overheads = axes.lines[0].get_data()
    assert [round(x * MIB) for x in peaks] == [plan.predicted.peak_bytes for plan in plans]
    assert list(overheads) == [pytest.approx(100 * plan.overhead) for plan in plans]
    refused = CliRunner().invoke(app, ["sweep", f"{builder}:build", "--figure", "frontier.gif"])
    assert refused.exit_code == 2
    assert ".svg" in refused.stderr


def test_what_is_unpacked_or_fetched_is_not_run_again() -> None:
    plan = layered_plan()
    (graph,) = plan.graphs
    (op,) = (i for i in graph.recomputed if graph.ops[i].module == "model.layers.2.up")
    packed = plan.model_copy(update={"graphs": [graph.model_copy(update={"packed": [op]})]})
    fetched = packed.model_copy(update={"target": plan.target.model_copy(update={"offload": "disk"})})
    for other, kept in ((packed, MIB // 8), (fetched, 0)):
        (row,) = different_modules(plan, other)
        assert (row.module, row.first) == ("model.layers.2.up", Treatment(0, 1, 0.001))
        assert row.second == Treatment(kept, 0, 0.0)


def test_layers_that_are_treated_alike_are_one_line_whatever_their_times() -> None:
    def timed(kept_layers: int) -> Plan:
        plan = layered_plan(kept_layers=kept_layers)
        (graph,) = plan.graphs
        ops = [op.model_copy(update={"seconds": float(i)}) for i, op in enumerate(graph.ops)]
        return plan.model_copy(update={"graphs": [graph.model_copy(update={"ops": ops})]})

    found = {row.module: row for row in different_modules(timed(1), timed(3))}
    row = found["model.layers.*.up"]
    assert (len(found), row.count) == (6, 2)
    assert row.first.rerun_seconds == (30 + 38) / 2  # layers 3 and 4
