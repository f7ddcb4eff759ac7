"""The texts of all warnings and errors, read from the code: a hook of mkdocs."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- messages -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the messages into the page that asks for them; called by mkdocs for every page.

    Results quote code, in which two brackets in a row are no link.
    """
    if page.file.src_uri == "zoo.md":
        return markdown.replace("][", "]\\[")
    return markdown.replace(MARK, listing()) if MARK in markdown else markdown


def listing() -> str:
    """Every message by kind, as Markdown."""
    kinds: dict[str, set[str]] = {}
    for kind, text in messages():
        kinds.setdefault(kind, set()).add(text)
    parts = []
    for kind in sorted(kinds, key=lambda kind: (kind != "PlanWarning", kind)):
        lines = [f"- {_escaped(text)}" for text in sorted(kinds[kind])]
        parts.append("\n".join([f"## {kind}", "", *lines]))
    return "\n\n".join(parts)


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """The kind and the text of everything that is warned of or raised, with … for what is filled in."""
    return tuple((kind, text) for kind, texts, _ in _calls() for text in texts)


@cache
def unread() -> tuple[str, ...]:
    """Where something is warned of or raised whose text is not found by reading the code."""
    return tuple(place for _, texts, place in _calls() if not texts)


_PUBLIC = {"InconsistentError": "PlanFileError", "TooSlow": "BudgetError"}
"""Errors of our own that users know as what they are made of."""


@cache
def _calls() -> tuple[tuple[str, list[str], str], ...]:
    """The kind, the texts and the place of each call that warns, or makes an error."""
    errors, code, found = error_classes(), _code(), []
    for path, tree in code.files:
        for scope, node in _scoped(tree):
            name = _name(node.func)
            warns = name in code.warners and not (
                isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "logger.warn"
            )
            if not node.args or not (warns or name in errors):
                continue
            first = node.args[0]
            # What a function that warns is given is read where it is called.
            if (warns or name == "InfeasibleBudget") and ast.unparse(first) in _arguments(scope):
                continue
            texts = [text for text in _texts(first, scope, tree, code) if re.search(r"\w", text)]
            kind = "PlanWarning" if warns else _PUBLIC.get(str(name), str(name))
            found.append((kind, texts, f"{path.relative_to(ROOT)}:{node.lineno}"))
    return tuple(found)


@cache
def error_classes() -> frozenset[str]:
    """PlannerError and its subclasses that are not private, and what plan files are refused by."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for _, tree in _code().files
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"PlannerError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return frozenset(name for name in found if not name.startswith("_")) | {"InconsistentError"}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MOST = 12


@dataclass(frozen=True)
class _Code:
    files: list[tuple[Path, ast.Module]]
    constants: dict[str, ast.expr]
    """Texts by the name that a module gives them."""
    functions: dict[str, list[ast.FunctionDef]]
    warners: frozenset[str]
    """Functions that warn of what they are given."""


@cache
def _code() -> _Code:
    paths = sorted((ROOT / "planner").rglob("*.py"))
    files = [(path, ast.parse(path.read_text())) for path in paths]
    constants: dict[str, ast.expr] = {}
    functions: dict[str, list[ast.FunctionDef]] = {}
    for _, tree in files:
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
                constants.update((name, statement.value) for name in names)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    warners = {"warn"}
    for name, of_name in functions.items():
        for function in of_name:
            given = _arguments(function)
            called = (n for n in ast.walk(function) if isinstance(n, ast.Call) and n.args)
            if any(_name(n.func) == "warn" and ast.unparse(n.args[0]) in given for n in called):
                warners.add(name)
    return _Code(files, constants, functions, frozenset(warners))


def _scoped(tree: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Every call, with the function that it is in."""
    scope = scope or tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield scope, node
        yield from _scoped(node, node if isinstance(node, _FUNCTIONS) else scope)


def _name(func: ast.expr) -> str | None:
    return getattr(func, "id", None) or getattr(func, "attr", None)


def _arguments(scope: ast.AST) -> set[str]:
    if not isinstance(scope, _FUNCTIONS):
        return set()
    of = scope.args
    return {argument.arg for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs)}


def _texts(node: ast.expr, scope: ast.AST, tree: ast.AST, code: _Code, depth: int = 0) -> list[str]:
    """What a text may be, with … for what is filled in."""

    def of(other: ast.expr, inside: ast.AST = scope) -> list[str]:
        return _texts(other, inside, tree, code, depth + 1)

    if depth > 8:
        return ["…"]
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.JoinedStr():
            parts = [of(p.value) if isinstance(p, ast.FormattedValue) and _is_constant(p.value) else
                     [p.value] if isinstance(p, ast.Constant) else ["…"] for p in node.values]  # fmt: skip
            return ["".join(chosen).replace("……", "…") for chosen in islice(product(*parts), _MOST)]
        case ast.BinOp(op=ast.Add()):
            return ["".join(both) for both in islice(product(of(node.left), of(node.right)), _MOST)]
        case ast.IfExp():
            return [*of(node.body), *of(node.orelse)]
        case ast.Name() | ast.Attribute():
            name = str(_name(node))
            given = [value for place in (scope, tree) for value in _assigned(name, place)]
            if isinstance(node, ast.Name) and given:
                return list(dict.fromkeys(text for value in given for text in of(value)))[:_MOST]
            return of(code.constants[name]) if name in code.constants and name.isupper() else ["…"]
        case ast.Call():
            found = code.functions.get(str(_name(node.func)), [])
            here = [function for function in found if function in _nodes(tree)] or found
            returned = [
                (r.value, f) for f in here for r in ast.walk(f) if isinstance(r, ast.Return) and r.value
            ]
            return [text for value, function in returned for text in of(value, function)][:_MOST] or ["…"]
    return ["…"]


def _is_constant(node: ast.expr) -> bool:
    return str(_name(node)).isupper()


@cache
def _nodes(tree: ast.AST) -> dict[ast.AST, None]:
    """All nodes of a tree, in the order of `ast.walk`."""
    return dict.fromkeys(ast.walk(tree))


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """What a name is given in a function, or what a loop over a list finds there."""
    for node in _nodes(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node.value
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id == name:
            for call in _nodes(scope):
                if (
                    isinstance(call, ast.Call)
                    and ast.unparse(call.func) == f"{ast.unparse(node.iter)}.append"
                ):
                    yield call.args[0]


def _escaped(text: str) -> str:
    for character in "\\`*_[]<>#|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
