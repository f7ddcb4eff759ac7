"""The table of what we replace of PyTorch's: it is complete, and nothing in it is idle."""

import ast
import operator
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from planner._torch.compat import graphs_are_off, version
from planner._torch.patches import PATCHES, Patch, replace, replaced

ROOT = Path(__file__).resolve().parent.parent
INDICES = ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range")
SOURCES = [p for p in sorted((ROOT / "planner").rglob("*.py")) if p.name != "patches.py"]
OBJECTS = [row for row in PATCHES if row.target.startswith("torch.")]


def _owner(row: Patch) -> Any:
    """The module or class that a target is an attribute of."""
    parts = row.target.split(".")[:-1]
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return reduce(lambda owner, name: getattr(owner, name), parts[end:], module)
    raise LookupError(row.target)


@pytest.mark.skipif(graphs_are_off() is not None, reason="graphs alone need most of these")
@pytest.mark.parametrize("row", OBJECTS, ids=operator.attrgetter("target"))
def test_what_is_replaced_is_there(row: Patch) -> None:
    if row.since > version():
        pytest.skip(f"{row.target} came with PyTorch {row.since}")
    owner, name = _owner(row), row.target.rpartition(".")[2]
    added = {"__copy__", "_compile_session_context", "reconstruct"}
    optional = {"_warn_capture_scalar_outputs", *INDICES}
    assert hasattr(owner, name) or name in added | optional


@pytest.mark.parametrize("row", PATCHES, ids=operator.attrgetter("target"))
def test_every_row_is_used_and_tested(row: Patch) -> None:
    assert (ROOT / "tests" / f"{row.test}.py").is_file()
    name = row.target.removeprefix("handler: ")
    name = name if " " in name else name.rpartition(".")[2]
    name = {"kernels in Python": "kernels_replaced"}.get(name, f'"{name}"')
    assert any(name in path.read_text() for path in SOURCES), f"nothing replaces {row.target}"


def test_nothing_is_replaced_but_by_a_row() -> None:
    found = [where for path in SOURCES for where in _around_the_table(path)]
    assert not found


SETTINGS = ("torch.backends.",)
"""Attributes that PyTorch documents as what users set."""


def _around_the_table(path: Path) -> list[str]:
    """Where a file assigns to something that it imports from PyTorch, or patches something."""
    tree, torchs = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            torchs |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.partition(".")[0] == "torch"]
            torchs |= {alias.asname or "torch" for alias in names}

    def is_torchs(target: ast.expr) -> bool:
        if not isinstance(target, ast.Attribute | ast.Subscript):
            return False
        root: ast.expr = target
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        named = isinstance(root, ast.Name) and root.id in torchs
        return named and not ast.unparse(target).startswith(SETTINGS)

    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "patch.object")):
            changes = not ast.unparse(node.func).endswith(("getattr", "hasattr"))
            targets = [ast.Attribute(node.args[0], "_", ast.Store())] if node.args and changes else []
        if any(map(is_torchs, targets)):
            found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)[:80]}")
    return found


def test_what_has_no_row_is_not_replaced() -> None:
    with pytest.raises(LookupError, match=r"torch.functional.split is replaced and has no row"):
        replace(torch.functional, "split", None)
    with pytest.raises(LookupError, match="has no row"), replaced(torch.functional, {"split": None}):
        pass
    with pytest.raises(LookupError, match="says it is not"):
        replace(torch.nn.utils.parametrize, "_cache", {})
    assert callable(torch.functional.split)
