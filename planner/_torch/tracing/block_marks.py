"""Marks that operations of named blocks carry from Dynamo's graph into the joint graph.

Like :mod:`planner._torch.fake`, this says what it hides. All of it was seen to work with torch 2.13.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.fx.traceback

from planner._torch.compat import graphs_are_off

_PREFIX = "planner "


def marked(number: int, mark: str) -> AbstractContextManager[Any]:
    """A context that marks the operations that Dynamo traces, or that run, in it; nested marks add up.

    Args:
        number: Tells this from other marks of the same text.
        mark: Any text without a line break.
    """
    if graphs_are_off() is not None:
        return _noted(f"{_PREFIX}{number}", mark)
    return torch.fx.traceback.annotate({f"{_PREFIX}{number}": mark})


@contextmanager
def _noted(key: str, mark: str) -> Iterator[None]:
    # Other versions of PyTorch may lack `annotate`.
    meta = torch.fx.traceback.current_meta
    before = meta.get("custom")
    meta["custom"] = {**(before or {}), key: mark}
    try:
        yield
    finally:
        meta["custom"] = before


def marks_here() -> tuple[str, ...]:
    """The marks of what runs now, ``number mark``, outermost first; none where graphs are off."""
    custom = torch.fx.traceback.current_meta.get("custom") or {}
    return tuple(
        f"{key.removeprefix(_PREFIX)} {mark}" for key, mark in custom.items() if key.startswith(_PREFIX)
    )


def marks(node: torch.fx.Node) -> str:
    """The marks of a node of Dynamo's graph, a line each, ``number mark``, outermost first."""
    custom = node.meta.get("custom") or {}
    return "\n".join(
        f"{key.removeprefix(_PREFIX)} {mark}" for key, mark in custom.items() if key.startswith(_PREFIX)
    )
