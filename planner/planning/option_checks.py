"""Checks of the options that planning takes besides model, inputs, loss and budget: kind and range."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, get_args

from planner._torch.cuda.attention import Attention
from planner.training_step.inputs import InputError


class OptionError(InputError, ValueError):
    """An option is of another kind, or out of its range."""


def check_options(**options: Any) -> None:
    """See that options are of the kind that they are to be, before the long work.

    Args:
        options: Those of :func:`planner.plan`, ``sweep``, ``max_batch`` and ``verify``, by name.

    Raises:
        OptionError: One is not; the message says what is expected.
    """
    for name, value in options.items():
        expected = _CHECKS[name](value)
        if expected:
            shown = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
            raise OptionError(f"{name}={shown}: expected {expected}")


def _names(value: Any) -> str:
    """What is expected where names, one or several, are not given."""
    if isinstance(value, str):
        return ""
    if isinstance(value, Sequence) and all(isinstance(name, str) for name in value):
        return ""
    return 'a list of names, of modules ("encoder.layer.0") or operators ("aten.native_dropout")'


def _seconds(value: Any) -> str:
    return "" if _is_number(value) and value >= 0 else "a number of seconds, 0 or more"


def _share(value: Any) -> str:
    fits = value is None or (_is_number(value) and value >= 0)
    return "" if fits else "a share of the time, as 0.33, or None"


def _at_least(least: int) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        try:
            fits = operator.index(value) >= least and not isinstance(value, bool)
        except TypeError:
            fits = False
        return "" if fits else f"a whole number, {least} or more"

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_CHECKS: dict[str, Callable[[Any], str]] = {
    "accumulate": lambda value: "" if value is None or isinstance(value, bool) else "True, False or None",
    "attention": lambda value: (
        "" if value is None or value in get_args(Attention) else f"None or one of {get_args(Attention)}"
    ),
    "checkpoints": _names,
    "keep": _names,
    "max_overhead": _share,
    "most": _at_least(1),
    "points": _at_least(1),
    "progress": lambda value: (
        "" if value is None or callable(value) else "a function of a text and a fraction"
    ),
    "recompute": _names,
    "repeats": _at_least(0),
    "start": _at_least(1),
    "time_limit": _seconds,
}
