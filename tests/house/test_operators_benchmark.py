"""The benchmark of PyTorch's operators and modules."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operators import groups, markdown, verdict


def _result(**other: Any) -> dict[str, Any]:
    sizes = {"unplanned_predicted_bytes": 20, "unplanned_measured_bytes": 20}
    return (
        {"equal": True, "problems": [], "warnings": [], "predicted_bytes": 8, "measured_bytes": 8}
        | sizes
        | other
    )


def test_the_worst_of_the_samples_is_the_verdict_of_a_case() -> None:
    assert verdict({"results": [_result()]}) == "ok"
    assert verdict({"results": [_result(), _result(measured_bytes=7)]}) == "measured less"
    assert verdict({"results": [_result(measured_bytes=9), _result()]}) == "OVER"
    assert verdict({"results": [_result(measured_bytes=9, warnings=["it may take more"])]}) == "told"
    assert verdict({"results": [_result(measured_bytes=9), _result(equal=False)]}) == "DIFFERENT"
    assert verdict({"results": [{"refused": "CaptureError: no"}, _result()]}) == "refused"
    assert verdict({"results": [{"failed": "KeyError: no"}, _result()]}) == "FAILED"
    assert verdict({"failed": "took more than 5 s"}) == "FAILED"
    assert verdict({"results": [], "without": ["RuntimeError: no"]}) == "unable"


def test_cases_of_one_step_are_of_one_form_and_mode() -> None:
    cases = ["float32/operator/add", "float32/eval/nn.RNN", "bfloat16/operator/add", "float32/train/nn.RNN"]
    assert groups(cases, 9) == [[cases[2]], [cases[0], cases[3]], [cases[1]]]
    assert groups(cases[:1] * 5, 2) == [cases[:1] * 2, cases[:1] * 2, cases[:1]]


def test_what_is_not_well_is_on_the_page_by_name() -> None:
    rows = {
        "float32/operator/add": {"samples": 2, "results": [_result()]},
        "float32/train/nn.RNN": {
            "samples": 1,
            "results": [_result(equal=False, problems=["loss 0 differs"])],
        },
    }
    page = markdown(rows, 5, "auto")
    assert "2 cases of 5, 3 samples" in page
    assert "## DIFFERENT\n\n- `float32/train/nn.RNN`: loss 0 differs" in page
    assert "float32/operator/add" not in page


@pytest.mark.heavy
def test_a_few_operators_are_what_they_are_without_a_plan(tmp_path: Path) -> None:
    cases = ["bfloat16/in-place/clamp", "bfloat16/operator/nn.functional.gelu"]
    script = Path(__file__).parents[2] / "benchmarks" / "operators.py"
    results, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    given = [f"--cases={','.join(cases)}", f"--results={results}", f"--out={page}"]
    subprocess.run([sys.executable, str(script), *given], check=True, timeout=900)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["model"]: verdict(row) for row in rows} == dict.fromkeys(cases, "ok")
    assert "2 cases of" in page.read_text()
