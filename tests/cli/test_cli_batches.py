"""`planner max-batch`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.commands import app
from planner.user_plan import Plan

pytestmark = pytest.mark.heavy

BUILDERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())))
    def forward(self, x):
        return self.layers(x).square().mean()

def build():
    return Net(), lambda batch: (torch.empty(batch, 64),)

def build_rows():
    return Net(), (torch.randn(512, 64),)

def returns_args():
    return Net(), (torch.empty(4, 64),)
"""


@pytest.fixture(autouse=True)
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "batches.py").write_text(BUILDERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_largest_batch_and_its_plan(builders: Path) -> None:
    arguments = [
        "max-batch",
        "batches.py:build",
        "-b",
        "1MiB",
        "--solver",
        "sqrt_n",
        "--json",
        "-o",
        "p.json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    reported = json.loads(result.stdout)
    assert reported["batch"] > reported["unplanned"]["batch"] > 1
    assert reported["plan"]["whole_step"]["allocated_bytes"] <= 2**20
    assert Plan.load("p.json").model.inputs[0].shape == [reported["batch"], 64]


def test_sweeps_and_batches_in_pieces(builders: Path) -> None:
    common = ["--split", "loss", "--outputs", "dropped", "--costs", "roofline", "--encodings", "none"]
    result = CliRunner().invoke(
        app, ["sweep", "batches.py:build_rows", "--points", "2", "-o", "plans", *common]
    )
    assert result.exit_code == 0, result.stderr
    assert not all(Plan.load(plan).is_exact for plan in Path("plans").iterdir())
    given = ["-b", "200KiB", "--max-overhead", "any", "--solver", "sqrt_n", "--most", "64", "-o", "p.json"]
    result = CliRunner().invoke(app, ["max-batch", "batches.py:build", *given, *common])
    assert result.exit_code == 0, result.stderr
    assert not Plan.load("p.json").is_exact


def test_a_table_for_people() -> None:
    arguments = ["max-batch", "batches.py:build", "-b", "1MiB", "--solver", "sqrt_n", "--max-overhead", "20%"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    for word in ("no plan", "fastest", "largest at +20% (planned)", "at any price", "samples/s"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["batches.py:returns_args", "-b", "1MiB"], "make_args: expected a function", 2),
        (["batches.py:build", "-b", "60%"], "depends on the batch", 2),
        (["batches.py:build", "-b", "1MiB", "--max-overhead", "lots"], "--max-overhead", 2),
        (["batches.py:build", "-b", "10kB", "--solver", "sqrt_n"], "one sample needs", 3),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, code: int) -> None:
    result = CliRunner().invoke(app, ["max-batch", *arguments])
    assert result.exit_code == code
    assert words in result.stderr
