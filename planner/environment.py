"""The environment variables that this package reads: ``PLANNER`` and ``PLANNER_BUDGET``, and no others.

``PLANNER=0`` turns plans off: none is made by ``auto_checkpoint`` and none is installed, which one line on
standard error says. ``PLANNER_BUDGET=8GiB`` is the budget of modules that are planned at their first training
call, whatever budget the code gives.
"""

import os
import sys

from planner.errors import PlannerError, printable

_OFF, _ON = ("0", "false", "off", "no"), ("", "1", "true", "on", "yes")
_reported: set[str] = set()


class EnvironmentSettingError(PlannerError, ValueError):
    """An environment variable has a value that it cannot have."""


def plans_are_off() -> bool:
    """Whether ``PLANNER=0`` is set; says so on standard error, once in a process.

    Raises:
        EnvironmentSettingError: ``PLANNER`` is neither on nor off.
    """
    value = os.environ.get("PLANNER", "").strip().lower()
    if value in _ON:
        return False
    if value not in _OFF:
        raise EnvironmentSettingError(
            f"the environment variable PLANNER is {value!r}: expected 0 to turn plans off, or 1"
        )
    if "PLANNER" not in _reported:
        _reported.add("PLANNER")
        tell(f"plans are off, as the environment variable PLANNER={value} says: modules train without")
    return True


def budget_of_environment() -> str | None:
    """The budget that ``PLANNER_BUDGET`` names; None where it is not set."""
    return os.environ.get("PLANNER_BUDGET", "").strip() or None


def tell(text: str) -> None:
    """One line for the user, on standard error."""
    sys.stderr.write(f"planner: {printable(text)}\n")
    sys.stderr.flush()
