"""What the documentation shows runs, and what the planner warns and fails with is found in it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch.inductor.compiling import NO_COMPILER
from planner.hooks.autocast_cast_cache import SHARED_WEIGHT_WARNING
from planner.planning.one_backend import IN_EVALUATION
from planner.runtime.unplanned import COMPILED_BEFORE
from planner.training_step.inputs import SHARDED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages", DOCS / "site" / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = _site()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(6))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def _names() -> dict[str, Any]:
    """What the blocks of README and guides take to be there."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x, y = torch.randn(2048, 16), torch.randn(2048, 16)
    return {
        "planner": planner,
        "torch": torch,
        "model": _Net().train(),
        "x": x,
        "y": y,
        "backbone": backbone,
        "features": x,
    }


def _blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


PAGES = sorted(path for path in [ROOT / "README.md", *DOCS.rglob("*.md")] if _blocks(path))


AFRESH = {"README.md", "many-gpus.md"}
"""Pages whose blocks each take the model as it was, where others go on with the plan."""


@pytest.mark.heavy
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.name != "design.md"], ids=lambda path: path.stem
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_blocks_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _names()
    for number, block in enumerate(_blocks(path)):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)
        if path.name in AFRESH:
            names["model"] = _names()["model"]


def test_the_pages_with_blocks_are_known() -> None:
    guides = {"out-of-memory.md", "choosing-by-hand.md", "planning-a-step.md"}
    guides |= {"choosing-a-batch.md", "inductor.md", "many-gpus.md"}
    assert {path.name for path in PAGES} == {"README.md", "design.md", "tutorial.md"} | guides


def test_every_kind_of_error_is_in_the_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    kinds = {kind for kind, _ in site.messages()}
    assert {"PlanWarning", "InfeasibleBudget", "CaptureError"} <= kinds
    assert not [kind for kind in kinds if f"`{kind}`" not in text]
    named = set(re.findall(r"`(\w+(?:Error|Mismatch|Changed|Budget))`", text))
    assert named <= site.error_classes()


def test_every_text_that_is_warned_of_or_raised_is_listed() -> None:
    """Counted by another way through the code than the list's own: what follows `raise` and `warn(`."""
    listed = " ".join(re.sub(r"\\(.)", r"\1", site.listing()).split())
    missing = []
    for path in (ROOT / "planner").rglob("*.py"):
        found = re.findall(r"(?:raise (\w+)\(|[^.\w]warn\()\s*f?\"([^\"{\\]{12,})", path.read_text())
        for kind, text in found:
            start = " ".join(text.split())
            if (not kind or kind in site.error_classes()) and start not in listed:
                missing.append((path.name, start))
    assert not missing


def test_no_text_escapes_the_list() -> None:
    """Texts that constants, other functions and wrappers of `warn` give are read as well."""
    # They repeat another error's text, or a warning's, after their own first words.
    assert {place.partition(":")[0] for place in site.unread()} <= {
        "planner/planfile/graph_record.py",
        "planner/planfile/plan.py",
        "planner/planning/one_backend.py",
        "planner/planning/prepare.py",
        "planner/runtime/shapes/policy.py",
        "planner/verification/recheck.py",
    }
    listed = set(site.messages())
    for kind, text in (
        ("PlanWarning", SHARDED),
        ("PlanWarning", COMPILED_BEFORE),
        ("PlanWarning", SHARED_WEIGHT_WARNING),
        ("PlanWarning", IN_EVALUATION),
    ):
        assert (kind, text) in listed
    for kind, part in (
        ("PlannerError", "which this plan runs"),
        ("PlannerError", "optimizes manually"),
        ("PlanWarning", "a GPU has kernels of its own for"),
        ("PlanWarning", "a torch.profiler session was open"),
        ("CompilerError", NO_COMPILER),
        ("PlanFileError", "a forward operation stands after a backward one"),
        ("UnknownModule", "has no operation"),
    ):
        assert [text for other, text in listed if other == kind and part in text], part


def test_the_site_shows_all_pages_and_no_other() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w/.-]+\.md", text.partition("\nnav:")[2]))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert named <= there
    assert not {page for page in there - named if not page.startswith("results/")}


def test_the_public_names_are_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text()
    functions = [n for n in planner.__all__ if n.islower() and n != "format_bytes"]
    assert {"plan", "sweep", "compare", "estimate", "verify"} <= set(functions)
    for name in functions:
        assert re.search(rf"\b{name}\b", text), name
