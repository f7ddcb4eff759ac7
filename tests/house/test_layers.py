"""The rules by which the folders of planner/ and solvers/ depend on each other, and on PyTorch."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import planner
from planner._torch import compat

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = sorted(p for p in (ROOT / "planner").rglob("*.py") if "_torch" not in p.relative_to(ROOT).parts)
PRIVATE = {
    "_backward_hooks", "_cdata", "_forward_hooks", "_is_view", "_nnz", "_schema", "_sequence_nr",
    "_use_count", "_compiled_call_impl", "_call_impl",
}  # fmt: skip
"""Attributes that PyTorch's objects have, and that it does not document."""


def test_the_folders_depend_on_each_other_as_documented() -> None:
    # In a process of its own: it sets up logging for itself.
    code = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_design_page_names_the_folders_in_the_order_of_their_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rank = {
        name: number
        for number, layer in enumerate(reversed(contracts[0]["layers"]))
        for name in layer.split(" | ")
    }
    design = (ROOT / "docs" / "design.md").read_text()
    table = design.partition("| folder of `planner/` |")[2].partition("| folder of `solvers/` |")[0]
    named = re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)
    assert sorted(named) == sorted(p.parent.name for p in (ROOT / "planner").glob("*/__init__.py"))
    assert [rank[name] for name in named] == sorted(rank[name] for name in named)


def _private(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(a.name for a in node.names)]
            yield from (f"line {node.lineno}: {n}" for n in names if n.startswith("_"))
        elif isinstance(node, ast.Import):
            paths = [a.name for a in node.names if a.name.startswith("torch.")]
            yield from (f"line {node.lineno}: {p}" for p in paths if "._" in p)
        elif isinstance(node, ast.Attribute) and _is_private(node):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_private(node: ast.Attribute) -> bool:
    if node.attr.startswith("__"):
        return False
    path = ast.unparse(node)
    of_torch = path.startswith("torch.") and any(part.startswith("_") for part in path.split("."))
    aten = path.startswith("torch.ops.")  # names of operators, which many private ones are among
    return (of_torch and not aten) or node.attr in PRIVATE


def test_private_names_of_pytorch_are_in_one_place() -> None:
    found = {}
    for path in OUTSIDE:
        names = list(_private(ast.parse(path.read_text())))
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert not found


def test_every_private_name_that_not_all_versions_have_is_there_as_the_table_says() -> None:
    version = compat.version()
    for row in compat.TABLE:
        there = compat.private(row.name) is not None
        if row.argument is not None:
            there = compat.takes_argument(row.name, row.argument)
        assert there == (version >= row.since), row


@pytest.mark.parametrize("version", [(2, compat.NEWEST[1] + 1), (2, compat.OLDEST[1] - 1)])
def test_with_a_pytorch_that_graphs_were_not_tested_with_plans_are_replayed(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)]
    model, x = torch.nn.Sequential(*layers), torch.randn(512, 32)
    graphs = planner.plan(model, x, budget="100%", solver="none")
    assert graphs.target.backend == "eager"
    monkeypatch.setattr(compat, "version", lambda: version)
    plan = planner.plan(model, x, budget="min")
    assert plan.target.backend == "replay"
    assert any("none of those that graphs were tested with" in note for note in plan.notes)
    assert planner.verify(model, x, plan=plan, repeats=0).ok
    for backend in ("graph", "inductor"):
        with pytest.raises(planner.PlannerError, match="Plan with backend='replay'"):
            planner.plan(model, x, budget="100%", backend=backend)
    with pytest.raises(planner.PlannerError, match="plan again with backend='replay'"):
        graphs.apply(model)


def test_what_another_pytorch_lacks_is_missed_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError):
        compat.of_graphs("torch.fx", "Nothing")
    monkeypatch.setattr(compat, "version", lambda: (2, compat.OLDEST[1] - 1))
    node, missing = compat.of_graphs("torch.fx", "Node", "Nothing")
    assert node is torch.fx.Node
    with pytest.raises(planner.PlannerError, match=r"part: PyTorch .* Plan with backend='replay'"):
        missing.part()
