"""Modules that are imported while a step is traced are run as at any other time.

A forward may import a library when it is first called. What that file computes at its top, tables for
instance, would otherwise be tensors without data for the rest of the process. Seen to work with torch 2.13.
"""

import contextlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from planner._torch.fake import without_modes


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find; its files are run without the modes that trace."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                _run_without_modes(spec.loader)
                return spec
        return None


def _run_without_modes(loader: Any) -> None:
    """Let a loader run its next file so. Loaders of built-in modules are classes, and run nothing of ours."""
    run = getattr(loader, "exec_module", None)
    if run is None or isinstance(loader, type):
        return

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        with without_modes():
            run(module)

    with contextlib.suppress(AttributeError):  # it takes no attributes
        loader.exec_module = exec_module


@contextlib.contextmanager
def imports_without_modes() -> Iterator[None]:
    """Within this, imports run files without the modes that are active."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)
