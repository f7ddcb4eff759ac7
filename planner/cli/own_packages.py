"""The packages of this program, beside files and folders of the user's that have the same names."""

import contextlib
import importlib
import importlib.util
import os
import sys

from planner.errors import PlannerError

_NAMES = ("planner", "solvers")
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class ShadowedError(PlannerError, ImportError):
    """Another package is imported under the name of one of this program's."""


def import_own() -> None:
    """Import what planning needs, and PyTorch with it, before the user's directories are on the path.

    Raises:
        ShadowedError: another `solvers` has been imported already.
    """
    sys.path.insert(0, _HOME)
    try:
        check_solvers()
        for name in ("api", "batch.max_batch", "estimation.comparison", "verification.verify"):
            importlib.import_module(f"planner.{name}")
        with contextlib.suppress(ImportError):  # there is another solver
            importlib.import_module("highspy")
    finally:
        sys.path.remove(_HOME)


def check_solvers() -> None:
    """See that `solvers` is this program's package.

    Raises:
        ShadowedError: it is another one; the message says which file.
    """
    module = sys.modules.get("solvers")
    if module is not None:
        place = module.__file__
    else:
        found = importlib.util.find_spec("solvers")
        place = found.origin if found is not None else "none"
    if place is None or os.path.dirname(os.path.abspath(place)) != os.path.join(_HOME, "solvers"):
        raise ShadowedError(
            f"this library needs its own package 'solvers' in {_HOME}, but Python finds "
            f"{place or 'a folder without __init__.py'}: rename that, or put it later on the path"
        )


def hidden_by_own(error: ImportError) -> str:
    """The text to add to an import error of the user's code if this program hides the module it needs."""
    name = (error.name or "").partition(".")[0]
    if name not in _NAMES:
        return ""
    for directory in dict.fromkeys([os.getcwd(), *sys.path]):
        for path in (os.path.join(directory, name), os.path.join(directory, f"{name}.py")):
            if os.path.exists(path) and path != os.path.join(_HOME, name):
                return f"; {name!r} is this program's own package here, which hides {path}: rename that"
    return ""
