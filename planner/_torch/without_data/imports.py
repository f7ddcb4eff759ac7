"""Python modules that are imported while a step is traced run without the modes that trace.

A forward may import a library when it is first called. Tensors that its files compute when imported, tables
for instance, would otherwise be without data for the rest of the process.
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
    """Finds modules as the other finders do, and has their files run without the modes that trace."""

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
    """Let a loader run its next file without modes. Loaders of built-in modules, which are classes, stay."""
    run = getattr(loader, "exec_module", None)
    if run is None or isinstance(loader, type):
        return

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        with without_modes():
            run(module)

    with contextlib.suppress(AttributeError):  # it takes no attributes
        loader.exec_module = exec_module


@contextlib.contextmanager
def imports_without_modes() -> Iterator[None]:
    """A context in which imports run files without the active modes."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)
