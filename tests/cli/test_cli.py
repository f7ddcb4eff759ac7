"""The command line: results, exit codes, and one clear line for whatever is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import planner
from planner.cli.builder import load_reference
from planner.cli.commands import app
from planner.planfile.plan import plan_schema
from planner.user_plan import Plan
from tests.builders import BUILDERS
from tests.plans import layered_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with builders.py, which is the current directory."""
    (tmp_path / "builders.py").write_text(BUILDERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("builders", "_built_from_builders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What planner.plan is called with; it gives a plan that is made up."""
    made: list[SimpleNamespace] = []

    def plan(model: Any, **options: Any) -> Plan:
        made.append(SimpleNamespace(model=model, **options))
        options["progress"]("capturing", 0.1)
        options["progress"]("solving", 0.5)
        return layered_plan()

    monkeypatch.setattr(planner, "plan", plan, raising=False)
    return made


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _refused(result: Result, *key_words: str, code: int = 2) -> None:
    """The command printed one line about what is wrong, and nothing else."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    progress = ("importing PyTorch and", "building")
    lines = [line for line in result.stderr.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in key_words:
        assert word in lines[0]


def test_plan_writes_the_plan_and_shows_it(builders: Path, calls: list[SimpleNamespace]) -> None:
    result = _run("plan", "builders:build", "--budget", "60%", "-o", "plan.json", "--optimizer", "adamw")
    assert result.exit_code == 0, result.output
    assert Plan.load("plan.json") == layered_plan()
    assert "zoo.GPT" in result.stdout
    assert "written to plan.json" in result.stdout
    assert "building" not in result.stdout
    assert "capturing (10%)" in result.stderr
    (call,) = calls
    assert type(call.model).__name__ == "Net"
    assert call.args[0].shape == (64, 32)
    assert (call.budget, call.solver, call.optimizer, call.device, call.time_limit) == (
        "60%",
        "auto",
        "adamw",
        None,
        60.0,
    )
    assert call.loss is None


def test_json_is_all_there_is_on_stdout(builders: Path, calls: list[SimpleNamespace]) -> None:
    result = _run("plan", "builders.py:build", "-b", "min", "--json", "-o", "plan.json")
    described = json.loads(result.stdout)
    assert described["predicted"]["dynamic_peak_bytes"] == layered_plan().predicted.dynamic_peak_bytes
    assert described["overhead"] == pytest.approx(0.1)
    assert (described["saved_to"], described["recomputed_ops"], described["forward_ops"]) == (
        "plan.json",
        28,
        50,
    )


def test_builders_are_found_in_files_and_modules(builders: Path, calls: list[SimpleNamespace]) -> None:
    (builders / "package").mkdir()
    (builders / "package" / "models.py").write_text("from builders import *\n")
    for reference in ("builders:with_keywords", "package.models:build", "package/models.py:build"):
        assert _run("plan", reference, "-b", "60%").exit_code == 0
    absolute = _run(
        "plan", f"{builders / 'builders.py'}:build_output", "-b", "1GiB", "--loss", "builders:mean"
    )
    assert absolute.exit_code == 0
    assert calls[0].kwargs["x"].shape == (64, 32)
    assert calls[-1].loss.__name__ == "mean"


def test_a_file_that_holds_a_model_and_its_loss_runs_once(
    builders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (builders / "both.py").write_text(
        "model = object()\ndef build(): return model\ndef loss(): return model\n"
    )
    (builders / "own-name.py").write_text((builders / "both.py").read_text())
    for name in ("both.py", "own-name.py"):
        made, loss = (load_reference(f"{name}:{what}") for what in ("build", "loss"))
        assert made() is loss()
    (builders / "inner").mkdir()
    for name in ("one", "two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (builders / "inner" / f"{name}.py").write_text((builders / "both.py").read_text())
    for places in (("inner.one", "inner/one.py"), ("inner/two.py", "inner.two")):
        made, loss = (
            load_reference(f"{p}:{what}") for p, what in zip(places, ("build", "loss"), strict=True)
        )
        assert made() is loss()


@pytest.mark.parametrize(
    ("reference", "key_words"),
    [
        ("builders", ["'builders'", "expected pkg.module:function"]),
        ("missing:build", ["no module named 'missing'"]),
        ("builders.inner:build", ["builders.inner"]),
        ("missing.py:build", ["missing.py: no such file"]),
        ("builders:missing", ["builders has no missing"]),
        ("builders:number", ["number is a int", "expected a function"]),
        ("builders:raises", ["RuntimeError: no weights to be found", "--debug"]),
        ("builders:leaves", ["SystemExit: 7"]),
        ("builders:returns_model", ["returned a Net", "expected (model, args)"]),
        ("builders:returns_no_module", ["returned no model", "a str", "nn.Module"]),
        ("builders:returns_number_as_args", ["of type int", "(x,)"]),
        ("builders:returns_bad_kwargs", ["kwargs"]),
        ("broken:build", ["importing broken raised", "SyntaxError"]),
        ("needs_more:build", ["importing needs_more raised", "ModuleNotFoundError", "not_installed"]),
        ("broken.py:build", ["broken.py raised", "SyntaxError"]),
    ],
)
def test_a_builder_that_does_not_build(
    builders: Path, calls: list[SimpleNamespace], reference: str, key_words: list[str]
) -> None:
    (builders / "broken.py").write_text("def build(:\n")
    (builders / "needs_more.py").write_text("import not_installed\n")
    before = sorted(os.listdir())
    _refused(_run("plan", reference, "-b", "60%", "-o", "plan.json"), *key_words)
    assert sorted(name for name in os.listdir() if name != "__pycache__") == before
    assert not calls


@pytest.mark.parametrize("budget", ["12 bananas", "0", "8G", "-1"])
def test_a_bad_budget_is_refused_before_the_model_is_built(
    builders: Path, calls: list[SimpleNamespace], budget: str
) -> None:
    result = _run("plan", "builders:build", f"--budget={budget}")
    _refused(result, f"'{budget}'", "expected")
    assert "building\n" not in result.stderr


@pytest.mark.parametrize(
    ("option", "path", "key_words"),
    [
        ("-o", "missing/plan.json", ["missing/plan.json", "no directory"]),
        ("-o", ".", ["is not a file"]),
        ("--figure", "plan.txt", ["plan.txt", ".svg"]),
        ("--figure", "missing/plan.svg", ["no directory"]),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_built(
    builders: Path, calls: list[SimpleNamespace], option: str, path: str, key_words: list[str]
) -> None:
    result = _run("plan", "builders:build", "-b", "60%", option, path)
    _refused(result, *key_words)
    assert "building\n" not in result.stderr


def _raising(error: Exception) -> Callable[..., Any]:
    def plan(*_: Any, **__: Any) -> Any:
        raise error

    return plan


@pytest.mark.parametrize(
    ("error", "code", "key_words"),
    [
        (
            planner.InfeasibleBudget("at least 20 MiB", minimum_bytes=20 * 2**20, budget_bytes=5 * 2**20),
            3,
            ["at least 20 MiB"],
        ),
        (planner.CaptureError("the forward\nbranches on data"), 2, ["the forward branches on data"]),
        (ValueError("solver 'magic' is not one of sqrt_n"), 2, ["'magic'", "--debug"]),
        (KeyError("layer"), 2, ["KeyError: 'layer'", "--debug"]),
    ],
)
def test_what_planning_raises_is_one_line(
    builders: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, key_words: list[str]
) -> None:
    monkeypatch.setattr(planner, "plan", _raising(error), raising=False)
    _refused(_run("plan", "builders:build", "-b", "5MiB", "-o", "plan.json"), *key_words, code=code)
    assert not Path("plan.json").exists()
    traced = _run("plan", "builders:build", "-b", "5MiB", "--debug")
    assert traced.exit_code == code
    assert "Traceback" in traced.stderr


def _report(ok: bool) -> SimpleNamespace:
    figures = {
        "ok": ok,
        "loss_equal": True,
        "gradients_equal": ok,
        "buffers_equal": True,
        "rng_equal": True,
        "measured_dynamic_peak_bytes": 99,
        "predicted_dynamic_peak_bytes": 100,
        "baseline_measured_dynamic_peak_bytes": 200,
        "baseline_predicted_dynamic_peak_bytes": 200,
        "seconds": 1.1,
        "baseline_seconds": 1.0,
        "overhead": 0.1,
        "overheads": [0.1],
        "unsplit_bytes": 0,
        "baseline_unsplit_bytes": 0,
        "problems": [] if ok else ["gradients: layers.0.weight differs by 0.5"],
    }
    return SimpleNamespace(**figures, to_dict=lambda: figures)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_says_so_and_exits_with_it(
    builders: Path, monkeypatch: pytest.MonkeyPatch, ok: bool, code: int
) -> None:
    monkeypatch.setattr(planner, "verify", lambda *_, **__: _report(ok), raising=False)
    layered_plan().save("plan.json")
    result = _run("verify", "builders:build", "plan.json")
    assert result.exit_code == code
    assert ("NOT VERIFIED" in result.stdout) != ok
    as_json = _run("verify", "builders:build", "plan.json", "--json")
    assert as_json.exit_code == code
    assert json.loads(as_json.stdout)["ok"] is ok


def test_verify_is_in_the_mode_of_the_plan(builders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def verify(model: Any, *_: object, **__: object) -> object:
        seen.append(model.training)
        return _report(True)

    monkeypatch.setattr(planner, "verify", verify)
    layered_plan().save("plan.json")
    assert _run("verify", "builders:build_in_evaluation", "plan.json").exit_code == 0
    assert seen == [True]


def test_verify_leaves_parts_in_their_mode(builders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import torch", "from torch import nn", "def build():"]
    lines.append("    return nn.Sequential(nn.Dropout(), nn.Dropout().eval()), (torch.ones(2),)")
    (builders / "parts.py").write_text("\n".join(lines))
    seen = []

    def verify(model: Any, *_: object, **__: object) -> object:
        seen.extend(part.training for part in model)
        return _report(True)

    monkeypatch.setattr(planner, "verify", verify)
    layered_plan().save("plan.json")
    assert _run("verify", "parts.py:build", "plan.json").exit_code == 0
    assert seen == [True, False]


def test_verify_reads_the_plan_before_it_builds(builders: Path) -> None:
    (builders / "plan.json").write_text(layered_plan().dumps()[:500])
    result = _run("verify", "builders:build", "plan.json")
    _refused(result, "plan.json", "cut short")
    assert "building\n" not in result.stderr


def test_the_plan_and_the_model_in_the_wrong_order_are_told_apart(builders: Path) -> None:
    layered_plan().save("plan.json")
    _refused(_run("verify", "plan.json", "builders:build"), "planner verify builders:build plan.json")


def test_show(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    layered_plan().save(path)
    result = _run("show", str(path), "--figure", str(tmp_path / "plan.svg"))
    assert result.exit_code == 0
    assert "re-run" in result.stdout
    assert (tmp_path / "plan.svg").exists()
    assert json.loads(_run("show", str(path), "--json").stdout)["coverage"] == "one-graph"


def test_show_of_what_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(layered_plan().dumps().replace('"schema_version": 2', '"schema_version": 99'))
    _refused(_run("show", str(path)), "schema_version", "99")
    _refused(_run("show", str(tmp_path / "missing.json")), "missing.json", "cannot be read")


def test_schema(tmp_path: Path) -> None:
    assert json.loads(_run("schema").stdout) == plan_schema()
    path = tmp_path / "schema.json"
    assert _run("schema", "-o", str(path)).exit_code == 0
    assert json.loads(path.read_text()) == plan_schema()


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "builders:build"],
        ["plan", "builders:build", "--budget", "60%", "--time-limit", "soon"],
        ["plan", "builders:build", "--budget", "60%", "--time-limit", "-1"],
        ["conquer"],
        ["show", "--colour"],
        ["calibrate", "--device", "tpu"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.output
    assert "Traceback" not in result.output


def test_help_and_version() -> None:
    assert _run("--version").stdout.strip() == planner.__version__
    for arguments in (["--help"], ["plan", "-h"], ["verify", "-h"], ["show", "-h"], ["schema", "-h"]):
        assert _run(*arguments).exit_code == 0


def _process(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code", "key_words"),
    [
        (["plan", "builders:build", "--budget", "12 bananas"], 2, "'12 bananas'"),
        (["plan", "builders:raises", "--budget", "60%", "-o", "plan.json"], 2, "no weights to be found"),
        (["show", "builders.py"], 2, "not valid JSON"),
        (["nonsense"], 2, "nonsense"),
        (["--version"], 0, ""),
    ],
)
@pytest.mark.heavy
def test_exit_codes_of_the_process(builders: Path, arguments: list[str], code: int, key_words: str) -> None:
    process = _process(*arguments, cwd=builders)
    assert process.returncode == code, process.stderr
    assert key_words in process.stderr
    assert "Traceback" not in process.stderr
    assert not (builders / "plan.json").exists()


def test_importing_planner_is_light() -> None:
    code = (
        "import sys, planner; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    )
    assert process.stdout.strip() == "[]"


@pytest.mark.heavy
def test_a_plan_from_the_command_line_verifies(builders: Path) -> None:
    asked = ("plan", "builders:build", "--budget", "min", "--time-limit", "1", "-o", "plan.json", "--json")
    planned = _process(*asked, cwd=builders)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["saved_to"] == "plan.json"
    verified = _run("verify", "builders:build", "plan.json", "--repeats", "0", "--json")
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["gradients_equal"] is True


@pytest.mark.heavy
def test_a_budget_that_nothing_fits_exits_with_3(builders: Path) -> None:
    asked = ("plan", "builders:build", "--budget", "1KiB", "--solver", "sqrt_n")
    result = _run(*asked, "-o", "plan.json", "--json")
    assert result.exit_code == 3, result.output
    assert "error: budget 1KiB" in result.stderr
    assert json.loads(result.stdout)["minimum_bytes"] > 1024
    assert not (builders / "plan.json").exists()
    assert _process(*asked, cwd=builders).returncode == 3


@pytest.mark.heavy
def test_a_plan_of_another_model_is_refused(builders: Path) -> None:
    layered_plan().save(builders / "plan.json")
    result = _run("verify", "builders:build", "plan.json")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr


@pytest.mark.heavy
def test_a_sweep_prints_a_frontier_and_writes_its_plans(builders: Path) -> None:
    # A sweep's solvers go on until nothing better can be found.
    (builders / "plans").mkdir()
    (builders / "plans" / "plan-03.json").write_text("of a run before")
    result = _run("sweep", "builders:build_two_layers", "--points", "3", "-o", "plans", "--json")
    assert result.exit_code == 0, result.output
    assert "plans has plans of other runs too (1), as plan-03.json: remove them" in result.stderr
    found = json.loads(result.stdout)
    assert len(found) == 3
    assert [Path(row["saved_to"]).name for row in found] == ["plan-00.json", "plan-01.json", "plan-02.json"]
    overheads = [Plan.load(builders / row["saved_to"]).overhead for row in found]
    assert overheads == sorted(overheads)
    table = _run("sweep", "builders:build_two_layers", "--budgets", "90%,min")
    assert table.exit_code == 0, table.output
    assert "of unplanned" in table.stdout
    _refused(_run("sweep", "builders:build", "--budgets", "90%,12 bananas"), "'12 bananas'")
