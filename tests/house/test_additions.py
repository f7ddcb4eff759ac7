"""What it takes to add a solver, device, replay rule, hook and planning option: done in a copy, and used."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HOOK = '''"""Counts the forwards of planned graphs."""

from planner.compiled.graph_hook import GraphHook, HookContext

forwards = 0


class Counter(GraphHook):
    """Counts them."""

    watches = True

    def on_forward(self, node, args):
        global forwards
        forwards += 1


def hook(context: HookContext) -> Counter:
    """One that counts."""
    return Counter()
'''
RULE = '''"""``relu`` is run again as ``clamp_min``."""

import torch

from planner.graph.replay_rule import ReplayCall, ReplayRule


class Clamped(ReplayRule):
    """By another operator."""

    def matches(self, node):
        return node.target is torch.ops.aten.relu.default

    def call_again(self, node):
        return ReplayCall(torch.ops.aten.clamp_min.default, (node.args[0], 0), node.meta["val"])


RULES = (Clamped(),)
'''
NEW = {
    "hook": {"planner/hooks/count_forwards.py": HOOK},
    "replay rule": {"planner/graph/replay/relu.py": RULE},
}
"""Files to add."""
CHANGED = {
    "device": {
        "planner/costs/devices.py": [
            (r'    \("L4", ', '    ("Abacus", 1.0, 1, 0.01, 0.02, None, 0.02, None, None, None),\n\\g<0>'),
        ]
    },
    "planning option": {
        "planner/planning/options.py": [
            (r'class StepKeywords\(.*:\n    """.*"""\n\n', "\\g<0>    label: str\n"),
            ('    effort: Effort = "fast"\n', '\\g<0>    label: str = ""\n'),
            (
                r"_CHECKS: .* = {\n",
                '\\g<0>    "label": lambda value: "" if isinstance(value, str) else "a text",\n',
            ),
        ],
        "planner/cli/options.py": [
            ('    effort: EffortName = "fast"\n', '\\g<0>    label: str = ""\n'),
        ],
        "planner/planning/make_plan.py": [
            (
                re.escape("notes = [*reached, *captured.notes]\n"),
                "\\g<0>    notes += [prepared.options.label] * bool(prepared.options.label)\n",
            ),
        ],
    },
}
"""Texts to put in the place of others, as regular expressions."""
MOST = {"solver": 1, "device": 1, "replay rule": 1, "hook": 1, "planning option": 3}

USE = """
import torch
from typer.testing import CliRunner

import planner
from planner.cli.commands import app
from planner.costs.devices import find_device
from planner.hooks import count_forwards

model = torch.nn.Sequential(*(part for _ in range(3) for part in (torch.nn.Linear(8, 8), torch.nn.ReLU())))
x = torch.randn(4, 8)
step = planner.prepare(model, x, label="mine")

plan = step.plan("100%", recompute=["aten.relu"])
assert "mine" in plan.notes, plan.notes
assert "--label" in CliRunner().invoke(app, ["plan", "--help"]).output.replace("\\n", " ")
assert step.plan("100%", solver="every_second").solver.name == "every_second"
assert find_device("Abacus").bandwidth == 1e9
assert planner.verify(model, x, plan=plan, repeats=0).ok
before = count_forwards.forwards
plan.apply(model)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    model(x).sum().backward()
assert count_forwards.forwards == before + 1
assert "aten::clamp_min" in {event.name for event in profile.events()}
try:
    planner.plan(model, x, budget="90%", label=3)
except planner.PlannerError as error:
    assert "label=3: expected a text" in str(error)
else:
    raise AssertionError
print("all of it works")
"""


def _solver() -> str:
    """The solver that docs/design.md shows."""
    (found,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "design.md").read_text(), re.M | re.S)
    return found


def test_each_takes_few_files() -> None:
    files = {name: len(found) for name, found in (NEW | CHANGED).items()} | {"solver": 1}
    assert files.keys() == MOST.keys()
    assert all(files[name] <= MOST[name] for name in MOST)


@pytest.mark.heavy
def test_what_is_added_is_used(tmp_path: Path) -> None:
    for folder in ("planner", "solvers"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    added = {path: text for files in NEW.values() for path, text in files.items()}
    for path, text in (added | {"solvers/every_second.py": _solver()}).items():
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(text)
    for files in CHANGED.values():
        for path, replacements in files.items():
            text = (tmp_path / path).read_text()
            for old, new in replacements:
                text, count = re.subn(old, new, text)
                assert count == 1, (path, old)
            (tmp_path / path).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all of it works\n"
