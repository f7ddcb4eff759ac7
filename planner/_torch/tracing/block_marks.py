"""Marks that operations of named blocks carry from Dynamo's graph into the joint graph.

Like :mod:`planner._torch.fake`, this says what it hides. All of it was seen to work with torch 2.13.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.fx.traceback

from planner._torch.compat import graphs_are_off

_PREFIX = "planner "


def marked(number: int, mark: str) -> AbstractContextManager[Any]:
    """A context that marks the operations that Dynamo traces in it; nested marks add up.

    Args:
        number: Tells this from other marks of the same text.
        mark: Any text without a line break.
    """
    if graphs_are_off() is not None:
        return nullcontext()
    return torch.fx.traceback.annotate({f"{_PREFIX}{number}": mark})


def marks(node: torch.fx.Node) -> str:
    """The marks of a node of Dynamo's graph, a line each, ``number mark``, outermost first."""
    custom = node.meta.get("custom") or {}
    return "\n".join(
        f"{key.removeprefix(_PREFIX)} {mark}" for key, mark in custom.items() if key.startswith(_PREFIX)
    )
