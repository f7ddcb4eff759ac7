"""The benchmark for GPUs, tried on the CPU: its predictions are what it measures."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import planner.api
import planner.verification.verify
from benchmarks import gpu, gpu_elsewhere, gpu_facts
from benchmarks.frontiers import gpu_case
from benchmarks.frontiers.gpu_models import CASES, Case, Inputs
from benchmarks.frontiers.gpu_results import Row, judged
from planner.verification.verify import Report


@pytest.mark.heavy
def test_side_by_side_memory_comes_first_and_times_are_of_the_same_plans(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--small", "--repeats", "1", "--budgets", "60%", "--no-calibrate"]
    arguments += ["--peers", "checkpoint per block", "--inductor", "--jobs", "2", "--out", str(tmp_path)]
    arguments += ["--first"]
    arguments += ["--plans", str(tmp_path / "plans")]
    found = gpu.main([*arguments, "--models", "gpt2", "--precisions", "bf16"])
    ways = {row["way"]: Row(**row) for row in found["rows"]}
    assert set(ways) == {"unplanned", "plan 60%", "checkpoint per block", gpu_case.AS_CHECKPOINT}
    for row in ways.values():
        assert not row.problem
        assert row.measured_bytes is not None
        assert row.seconds is not None
        if row.way.startswith("plan"):
            assert row.predicted_bytes == row.measured_bytes
            assert row.right
            assert row.measured_overhead is not None
    plan, unplanned, peer = ways["plan 60%"], ways["unplanned"], ways["checkpoint per block"]
    assert unplanned.predicted_bytes == pytest.approx(unplanned.measured_bytes, rel=0.02)
    assert max(plan.measured_bytes, peer.measured_bytes) < unplanned.measured_bytes  # type: ignore[type-var, operator]
    assert plan.total_bytes <= plan.budget_bytes  # type: ignore[operator]
    assert ways[gpu_case.AS_CHECKPOINT].measured_bytes <= peer.measured_bytes + 1024  # type: ignore[operator]
    assert not found["judged"]["over_budget"]
    assert len(list((tmp_path / "plans").glob("gpt2-*.json"))) == 2
    written = next(tmp_path.glob("gpu-*.json"))
    assert json.loads(written.read_text())["rows"] == found["rows"]
    assert "plan 60%" in written.with_suffix(".md").read_text()


@pytest.mark.heavy
def test_what_is_predicted_elsewhere_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unplanned = gpu_elsewhere.planned("gpt2", "fp32", "100%", "H200", small=True)
    count = unplanned.baseline.dynamic_peak_bytes
    steps = [Row("gpt2", "fp32", "unplanned", measured_bytes=n) for n in (count, 2 * count)]
    rows = [*steps, Row("gpt2", "fp32", "plan 60%", measured_bytes=1), Row("sd-unet", "fp32", "unplanned")]
    rows.append(Row("gpt2", "fp32", "checkpoint per block", measured_bytes=count - 1))
    results = tmp_path / "gpu.json"
    rows.append(Row("gpt2", "fp32", gpu_case.AS_CHECKPOINT, predicted_overhead=0.5, measured_overhead=-0.25))
    calibration = {"launch_seconds": 1e-3}
    results.write_text(json.dumps({"rows": [asdict(row) for row in rows], "calibration": calibration}))
    plans = tmp_path / "plans"
    gpu_elsewhere.main([str(results), "--device", "H200", "--small", "--plans", str(plans)])
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[-2].strip() for line in table[2:]] == ["0", "-50.000%"]
    plan = planner.Plan.load(gpu_case.plan_file(plans, "gpt2", "fp32", gpu_case.AS_CHECKPOINT))
    assert plan.predicted.dynamic_peak_bytes <= count
    gpu_elsewhere.main([str(results), "--device", "H200", "--small", "--times"])
    (line,) = capsys.readouterr().out.splitlines()[2:]
    launches, then, now, measured, off, waits = [cell.strip() for cell in line.split("|")[4:-1]]
    assert (then, measured) == ("+50.0%", "-25.0%")
    assert float(off) == pytest.approx(float(now[:-1]) + 25, abs=0.11)
    # Launches of a millisecond are all that takes time.
    assert float(waits.removesuffix(" ms")) == pytest.approx(int(launches.partition(",")[0]), rel=0.03)


SMALL = ("--device", "cpu", "--small", "--repeats", "1", "--models", "resnet-50", "--precisions", "fp32")


def run_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **patched: Any
) -> dict[str, Any]:
    """Runs the benchmark with a model of one layer, and some of its parts replaced."""

    def build(small: bool) -> tuple[torch.nn.Module, Inputs]:
        return Loss(), ((torch.randn(4, 8),), {})

    monkeypatch.setattr(planner, "plan", quick_plan)
    monkeypatch.setitem(CASES, "resnet-50", Case(build, ("Linear",)))
    for name, function in patched.items():
        monkeypatch.setattr(gpu_case, name, function)
    return gpu.main([*SMALL, "--peers", "--inductor", "--out", str(tmp_path), *arguments])


def quick_plan(model: torch.nn.Module, *args: Any, budget: str, **kwargs: Any) -> planner.Plan:
    key = (budget, kwargs["backend"] + kwargs.get("offload", ""))
    if key not in _PLANS:
        _PLANS[key] = planner.api.plan(model, *args, **{**kwargs, "budget": budget, "costs": "roofline"})
    return _PLANS[key]


_PLANS: dict[tuple[str, str], planner.Plan] = {}


class Loss(torch.nn.Module):
    """A layer, an activation and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh().sin()).mean()


def test_what_is_not_begun_in_time_is_left_out(tmp_path: Path) -> None:
    found = gpu.main(["--device", "cpu", "--small", "--seconds", "0", "--out", str(tmp_path)])
    ways = 2 + len(gpu.BUDGETS) + len(gpu.PEERS) + len(gpu.INDUCTOR)
    first = len(gpu.FIRST) * len(gpu.FIRST_MODELS)
    assert len(found["left_out"]) == len(CASES) * len(gpu.PRECISIONS) * ways + first
    assert "Left out" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.heavy
def test_the_time_is_looked_at_inside_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 0.0, 0.0])  # after these the time is up
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(moments, 1e6))
    found = run_patched(tmp_path, monkeypatch, "--budgets", "80%", "60%")
    assert [row["way"] for row in found["rows"]] == ["unplanned"]
    assert found["left_out"] == ["resnet-50 fp32 plan 80%", "resnet-50 fp32 plan 60%"]


@pytest.mark.heavy
def test_results_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_patched(tmp_path, monkeypatch, planner=SimpleNamespace(plan=killed))
    written = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())
    assert [row["way"] for row in written["rows"]] == ["unplanned"]
    assert written["rows"][0]["measured_bytes"] > 0
    assert written["running"] == "resnet-50 fp32 plan 80%"
    assert "Not finished" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.heavy
def test_every_budget_is_compared_and_random_states_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = planner.verification.verify.verify
    equal = iter([True, False])

    def elsewhere(*args: Any, **kwargs: Any) -> Report:
        found = verify(*args, **kwargs)
        if next(equal):
            return found
        problems = ["the random generators are in another state after the planned step"]
        return replace(found, rng_equal=False, problems=problems)

    monkeypatch.setattr(planner, "verify", elsewhere)
    found = run_patched(tmp_path, monkeypatch, "--budgets", "100%", "95%")
    assert [row["right"] for row in found["rows"]] == [None, True, False]
    assert "random generators" in found["rows"][2]["problem"]
    assert found["judged"]["wrong"] == ["resnet-50 fp32 plan 95%"]


@pytest.mark.parametrize("part", ["measure_peak", "measure_seconds"])
@pytest.mark.heavy
def test_out_of_memory_is_a_row(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = getattr(gpu_case, part), []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(part)
        if len(calls) == 2:  # the plan's
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(*args, **kwargs)

    found = run_patched(tmp_path, monkeypatch, "--budgets", "100%", **{part: full})
    row = found["rows"][1]
    assert row["way"] == "plan 100%"
    assert row["problem"].startswith("OutOfMemoryError: CUDA out of memory")
    assert (row["measured_bytes"] is None) == (part == "measure_peak")
    assert row["predicted_bytes"] > 0
    assert found["judged"]["failed"] == ["resnet-50 fp32 plan 100%"]
    assert "OutOfMemoryError" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.heavy
def test_a_comparison_that_runs_out_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(planner, "verify", full)
    row = run_patched(tmp_path, monkeypatch, "--budgets", "100%")["rows"][1]
    assert row["measured_bytes"] > 0
    assert row["right"] is None
    assert row["problem"] == "not compared: OutOfMemoryError: CUDA out of memory"


@pytest.mark.heavy
def test_a_plan_that_inductor_runs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_patched(tmp_path, monkeypatch, "--budgets", "100%", "--inductor", "100%")
    unplanned, _, fused = found["rows"]
    assert [row["way"] for row in found["rows"]] == ["unplanned", "plan 100%", "inductor 100%"]
    assert fused["right"]
    assert not fused["problem"]
    assert fused["measured_bytes"] > 0
    assert fused["measured_overhead"] == pytest.approx(fused["seconds"] / unplanned["seconds"] - 1)


@pytest.mark.heavy
def test_what_is_new_runs_first_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ("unplanned", "compile", gpu_case.COMPILED_CHECKPOINT, "recorded 300%", "offload 300%")
    monkeypatch.setattr(gpu, "FIRST", ways)
    monkeypatch.setattr(gpu, "FIRST_MODELS", ("resnet-50",))
    found = run_patched(tmp_path, monkeypatch, "--budgets", "--first", *ways)
    rows = [Row(**row) for row in found["rows"]]
    assert [row.way for row in rows] == [*ways]
    assert not any(row.problem for row in rows)
    assert all(row.seconds for row in rows)
    assert [row.right for row in rows] == [None, None, None, True, True]


@pytest.mark.heavy
def test_rows_of_other_precisions_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_patched(tmp_path, monkeypatch, "--budgets")
    for _ in range(2):
        found = run_patched(tmp_path, monkeypatch, "--budgets", "--precisions", "bf16")
        assert [row["precision"] for row in found["rows"]] == ["fp32", "bf16"]


def test_promises_that_are_broken_are_reported() -> None:
    rows = [
        Row("m", "fp32", "plan 60%", 100, 97, budget_bytes=99, total_bytes=100, right=False),
        Row("m", "fp32", "plan 80%", 100, 101, predicted_overhead=0.1, measured_overhead=0.3),
        Row("m", "fp32", "compile 0.5", 100),
    ]
    found = judged(rows)
    assert found["largest_memory_error"] == pytest.approx(0.03)
    assert found["most_below_measured"] == pytest.approx(0.03)
    assert found["largest_overhead_error"] == pytest.approx(0.2)
    assert found["over_budget"] == found["wrong"] == ["m fp32 plan 60%"]


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu" in capsys.readouterr().err


def test_a_fact_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Iterator[str]:
        yield "begun"
        raise RuntimeError("no kernel\nand more")

    def holds() -> Iterator[str]:
        yield "as said"

    monkeypatch.setattr(gpu_facts, "FACTS", [fails, holds])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_facts.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "fails: begun",
        "fails: could not be tried: RuntimeError: no kernel",
        "holds: as said",
    ]
