"""Checks and corrections of a planned graph while it runs, one a file.

In: a planned graph at work. Out: eager's results where the graph alone would differ, or a warning.

A file with a function ``hook(context)`` is found here, and each planned graph gets a hook from it. Files
without it (:mod:`~planner.hooks.awaiting_backward`, :mod:`~planner.hooks.undefined_gradients`,
:mod:`~planner.hooks.unused_outputs`, :mod:`~planner.hooks.written_in_place`) take part in capturing or
compiling a graph, and are named there.
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
