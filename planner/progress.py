"""Reports of how far long work has come."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done, and how much of all is done, from 0 to 1."""


def no_report(text: str, fraction: float) -> None:
    """A progress report that goes nowhere."""
