"""The table of what we replace of PyTorch's: it is complete, and nothing in it is idle."""

import ast
import operator
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from planner._torch import patches
from planner._torch.compat import PRIVATE_MODULES, graphs_are_off, version
from planner._torch.patches import PATCHES, Patch, replace, replaced

ROOT = Path(__file__).resolve().parents[2]
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
    assert any((ROOT / "tests").rglob(f"{row.test}.py"))
    name = row.target.removeprefix("handler: ")
    name = name if " " in name else name.rpartition(".")[2]
    name = {"kernels in Python": "kernels_replaced"}.get(name, f'"{name}"')
    assert any(name in path.read_text() for path in SOURCES), f"nothing replaces {row.target}"


def test_nothing_is_replaced_but_by_a_row() -> None:
    found = [where for path in SOURCES for where in _around_the_table(path)]
    assert not found


@pytest.mark.parametrize("there", [True, False])
def test_another_name_hides_no_patch(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.test_patches_of_pytorch.ROOT", tmp_path)
    named = "torch.amp.autocast" if there else "list()"
    path = tmp_path / "one.py"
    path.write_text(f"import torch\nregion: object = {named}\nregion.__enter__ = None\n")
    assert bool(_around_the_table(path)) is there


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

    def is_rooted(expression: ast.expr | None, among: set[str]) -> bool:
        while isinstance(expression, ast.Attribute | ast.Subscript):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id in among

    tables = set(torchs)
    for node in ast.walk(tree):  # other names for the same; what they hold entries of has a row, or is public
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_rooted(node.value, torchs):
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            torchs |= {name.id for name in names if isinstance(name, ast.Name)}

    def is_torchs(target: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):
            return is_rooted(target, tables)
        is_part = isinstance(target, ast.Attribute) and is_rooted(target, torchs)
        return is_part and not ast.unparse(target).startswith(SETTINGS)

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


def test_methods_are_replaced_where_newer_versions_look_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        handler: object = "as it was"

    class Variable:
        method_item: object = "as it was"
        tp_methods: ClassVar = {"item": Entry(), "size": Entry()}

    row = Patch(f"{Variable.__module__}.{Variable.__qualname__}.method_item", "", "", for_good=True)
    monkeypatch.setitem(patches._ROWS, row.target, row)
    replace(Variable, "method_item", "replaced")
    assert Variable.method_item == "replaced"
    assert [entry.handler for entry in Variable.tp_methods.values()] == ["replaced", "as it was"]


def test_what_has_no_row_is_not_replaced() -> None:
    with pytest.raises(LookupError, match=r"torch.functional.split is replaced and has no row"):
        replace(torch.functional, "split", None)
    with pytest.raises(LookupError, match="has no row"), replaced(torch.functional, {"split": None}):
        pass
    with pytest.raises(LookupError, match="says it is not"):
        replace(torch.nn.utils.parametrize, "_cache", {})
    assert callable(torch.functional.split)


def _private_names(path: Path) -> set[str]:
    """Full names of PyTorch's of which a part begins with an underscore."""
    tree, alias, found = ast.parse(path.read_text()), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in node.names:
                alias[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torch":
                    found.add(name.name)
                    alias[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "of_graphs":
            module, *names = [a.value for a in node.args if isinstance(a, ast.Constant)] or [""]
            found |= {f"{module}.{name}" for name in names} or {str(module)}
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in alias:
            found.add(".".join([alias[node.id], *reversed(parts)]))
    found |= set(alias.values())
    return {name for name in found if any(p[:1] == "_" and p[:2] != "__" for p in name.split("."))}


@pytest.mark.skipif(graphs_are_off() is not None, reason="names lie elsewhere in other versions")
def test_every_module_with_private_names_is_in_the_table() -> None:
    used = {_module_of(name) for path in SOURCES for name in _private_names(path)}
    assert used == set(PRIVATE_MODULES)


def _module_of(name: str) -> str:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return ".".join(parts[:end])
    raise LookupError(name)
