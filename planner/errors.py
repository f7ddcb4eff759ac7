"""The errors of this package, as types that a caller can tell apart, and warnings to the user."""

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

_BETWEEN = (f"{Path(__file__).parent}/", contextlib.__file__, functools.__file__, "<")
"""Beginnings of the file names of frames that are skipped to find the user's line: this package, decorators,
and generated code."""


def printable(text: str, keep: str = "") -> str:
    r"""A text that terminals and pages may show: characters that move cursors, hide or turn text are escaped.

    Names come from files and from others' modules. An escape sequence becomes ``\x1b[31m``, a character that
    turns the direction of writing ``\u202e``.

    Args:
        text: The text.
        keep: Characters that are not escaped, as line breaks between lines of ours.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class PlannerError(Exception):
    """The base of every error that this package raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class CaptureError(PlannerError):
    """The module's training step could not be turned into a graph."""


class SkippedStep(CaptureError):
    """A training step returned no loss, as one does that skips its batch: there is nothing to plan in it."""


class CompilerError(PlannerError):
    """The compiler that Inductor calls is not there."""


class PlanMismatch(PlannerError):
    """A plan was made for another model, or for other inputs, than those that it gets now."""


class FreedError(PlanMismatch, RuntimeError):
    """A backward runs a second time, through tensors that the first one has freed. PyTorch's own error for it
    is a RuntimeError."""


class InputsChanged(PlannerError, RuntimeError):
    """A tensor that a planned backward reads again was changed in place since the forward."""


class PlanFileError(PlannerError, ValueError):
    """A plan file cannot be read, written, or does not hold a consistent plan."""


class PlanWarning(UserWarning):
    """A planned module runs something that its plan does not cover. Its results are still right."""


_collected: ContextVar[list[str] | None] = ContextVar("collected warnings", default=None)


@contextlib.contextmanager
def warnings_collected() -> Iterator[list[str]]:
    """A context in which the texts of :func:`warn` are collected, and shown to nobody."""
    told: list[str] = []
    token = _collected.set(told)
    try:
        yield told
    finally:
        _collected.reset(token)


def warn(text: str, *, cause: Exception | None = None) -> None:
    """Log a text, and warn the user with a :class:`PlanWarning` at the line of theirs that led to it.

    Args:
        text: Says what does not run as planned, and what to do.
        cause: The error that caused it. Its traceback goes to the log, at the level of DEBUG.
    """
    collected = _collected.get()
    if collected is not None:
        collected.append(text)
        return
    text = printable(text, keep="\n")
    logger.warning(text)
    if cause is not None:
        logger.debug("what is behind it:", exc_info=cause)
    warnings.warn(text, PlanWarning, stacklevel=_level_of_user(sys._getframe(1)))


def _level_of_user(frame: FrameType | None) -> int:
    """The ``stacklevel``, seen from :func:`warn`, of the innermost line of the user's code."""
    torch = sys.modules.get("torch")
    not_theirs = (*_BETWEEN, f"{Path(torch.__file__).parent}/" if torch and torch.__file__ else "<")
    level = 2
    while frame is not None:
        if not frame.f_code.co_filename.startswith(not_theirs):
            return level
        frame, level = frame.f_back, level + 1
    return 2


class BudgetError(PlannerError, ValueError):
    """A memory budget is not written in a form that can be understood."""


class InfeasibleBudget(PlannerError):
    """No schedule found fits the budget.

    Attributes:
        minimum_bytes: the least peak that a plan was found for.
        budget_bytes: the peak that was asked for.
    """

    def __init__(self, message: str, *, minimum_bytes: int, budget_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.budget_bytes = budget_bytes

    def __reduce__(self) -> tuple[object, ...]:
        # The default would lose the keyword-only arguments; worker processes hand errors over pickled.
        return _infeasible_budget, (str(self), self.minimum_bytes, self.budget_bytes)


def _infeasible_budget(message: str, minimum_bytes: int, budget_bytes: int) -> InfeasibleBudget:
    return InfeasibleBudget(message, minimum_bytes=minimum_bytes, budget_bytes=budget_bytes)
