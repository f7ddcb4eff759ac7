"""Reports of how far long work has come."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a text about the work that begins, and with the share of all work that is done, from 0 to 1."""


def no_report(text: str, fraction: float) -> None:
    """A progress report that goes nowhere."""


def part_of(report: Progress, begin: float, end: float) -> Progress:
    """Reports of a part of the work, which takes it from ``begin`` to ``end``."""
    return lambda text, fraction: report(text, begin + (end - begin) * fraction)
