"""The texts of all warnings and errors, read from the code: a hook of mkdocs."""

import ast
from collections.abc import Iterator
from functools import cache
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
    return tuple(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    errors = error_classes()
    for nodes in _files():
        texts = {
            target.id: node.value
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            warns = name == "warn" and not (
                isinstance(node.func, ast.Attribute) and "warnings" not in ast.unparse(node.func)
            )
            if warns or name in errors:
                text = _text(node.args[0], texts)
                if text.replace("…", "").strip():
                    yield "PlanWarning" if warns else str(name), text


@cache
def error_classes() -> frozenset[str]:
    """The names of all subclasses of PlannerError that are not private."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for nodes in _files()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {"PlannerError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return frozenset(name for name in found - {"PlannerError"} if not name.startswith("_"))


@cache
def _files() -> list[list[ast.AST]]:
    """The nodes of each file of the package."""
    paths = sorted((ROOT / "planner").rglob("*.py"))
    kinds = (ast.Assign, ast.Call, ast.ClassDef)
    return [[n for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, kinds)] for p in paths]


def _text(node: ast.expr, texts: dict[str, ast.expr], depth: int = 0) -> str:
    """A text with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, texts, depth) for part in node.values).replace("……", "…")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, texts, depth) + _text(node.right, texts, depth)
    if isinstance(node, ast.Name) and node.id in texts and depth < 3:
        return _text(texts[node.id], texts, depth + 1)
    return "…"


def _escaped(text: str) -> str:
    for character in "\\`*_[]<>#|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
