"""The solvers by name: every module of these folders that has a ``NAME`` and a function ``solve``."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from solvers.model.solver import Solve

FOLDERS = ("solvers", "solvers.chains", "solvers.programs")


def found_solvers() -> Iterator[tuple[str, Solve]]:
    """All solvers, each with its name."""
    for folder in FOLDERS:
        for found in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}."):
            if not found.ispkg and found.name != __name__:
                module = import_module(found.name)
                if hasattr(module, "NAME") and hasattr(module, "solve"):
                    yield module.NAME, module.solve


SOLVERS: dict[str, Solve] = dict(found_solvers())
