"""Checks and corrections of a planned graph while it runs, one a file.

A file with a function ``hook(context)`` is found here: every planned graph gets what that returns. The others
(:mod:`~planner.hooks.undefined_gradients`, :mod:`~planner.hooks.unused_outputs`) take part in how a graph is
compiled or captured, and are named there.
"""

from importlib import import_module
from pkgutil import iter_modules

from planner.compiled.graph_hook import GraphHook, HookContext

_FOUND = [
    getattr(import_module(found.name), "hook", None) for found in iter_modules(__path__, f"{__name__}.")
]


def hooks_for(context: HookContext) -> list[GraphHook]:
    """One hook of every kind, for one graph; by the names of their files."""
    return [make(context) for make in _FOUND if make is not None]
