"""The benchmark for GPUs, tried on the CPU: its predictions are what it measures."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.frontiers.gpu_results import Row, judged


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "precision"), [("gpt2", "fp32"), ("sd-unet", "bf16")])
def test_predicted_is_measured(model: str, precision: str, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--small", "--repeats", "1", "--budgets", "80%", "--out", str(tmp_path)]
    found = gpu.main([*arguments, "--models", model, "--precisions", precision])
    ways = {row["way"]: Row(**row) for row in found["rows"]}
    assert set(ways) == {"unplanned", "plan 80%", "checkpoint per block", "compile 0.5"}
    assert not [row.problem for row in ways.values() if row.problem]
    plan, unplanned, peer = ways["plan 80%"], ways["unplanned"], ways["checkpoint per block"]
    for row in (plan, unplanned):
        assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=0.02)
    assert plan.right
    assert plan.measured_bytes < unplanned.measured_bytes  # type: ignore[operator]
    assert plan.total_bytes <= plan.budget_bytes  # type: ignore[operator]
    assert peer.measured_bytes < unplanned.measured_bytes  # type: ignore[operator]
    assert not found["judged"]["over_budget"]
    written = next(tmp_path.glob("gpu-*.json"))
    assert json.loads(written.read_text())["rows"] == found["rows"]
    assert "plan 80%" in written.with_suffix(".md").read_text()


def test_a_model_that_is_not_done_in_time_is_left_out(tmp_path: Path) -> None:
    found = gpu.main(["--device", "cpu", "--small", "--seconds", "0", "--out", str(tmp_path)])
    assert len(found["left_out"]) == len(gpu.CASES) * len(gpu.PRECISIONS)
    assert "Left out" in next(tmp_path.glob("*.md")).read_text()


def test_promises_that_are_broken_are_told() -> None:
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
