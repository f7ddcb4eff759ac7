"""Memory budgets as people write them, and bytes as people read them."""

import operator
import re
from dataclasses import dataclass
from fractions import Fraction

from planner.errors import BudgetError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(
    r"(?P<sign>[-+]?)(?P<number>[0-9]{1,20}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})\s*(?P<unit>[A-Za-z]*|%)"
)
_LEAST = re.compile(
    r"min(?:\s*@\s*(?P<share>[0-9]{1,6}(?:\.[0-9]{1,12})?)\s*(?P<percent>%?))?", re.IGNORECASE
)
_LARGEST_BYTES = 2**63 - 1
_FORMS = 'a number of bytes, "8GiB", "8GB", "60%", "min" or "min@33%"'


@dataclass(frozen=True)
class Budget:
    """A budget for the peak of a training step."""

    bytes: int | None
    """The most bytes the step may take; None for "min", the least that can be reached."""
    text: str
    """The budget as it was written."""
    max_overhead: float | None = None
    """The most extra time of a step that takes the least bytes: 0.33 is 33 %; None for whatever it takes."""
    relative: bool = False
    """Whether it bounds the bytes that are allocated, as a share of the unplanned step does, not all bytes
    that the device must have."""


def parse_budget(value: int | str, baseline_peak_bytes: int) -> Budget:
    """Read a memory budget.

    Args:
        value: bytes as an int, or text: bytes ("1000000"), an amount with a unit ("8GiB" is 8 * 2**30 bytes,
            "8GB" is 8 * 10**9), a share of the unplanned step's peak ("60%"), "min" for the least
            that can be reached, or "min@33%" for the least at no more than 33 % extra time.
        baseline_peak_bytes: peak of the unplanned step, which percentages are of.

    Raises:
        BudgetError: the text cannot be understood, or the budget is not more than zero.
    """
    if isinstance(value, str):
        return _parse_text(value, baseline_peak_bytes)
    if isinstance(value, bool):
        raise BudgetError(f"budget {value!r} is not an amount of memory: expected {_FORMS}")
    try:
        amount = operator.index(value)
    except TypeError:
        is_share = isinstance(value, float) and 0 < value < 1
        hint = f'; write "{100 * value:.6g}%" for that share' if is_share else ""
        raise BudgetError(f"budget {value!r} is a {type(value).__name__}: expected {_FORMS}{hint}") from None
    return Budget(_checked(Fraction(amount), repr(amount)), str(amount))


def _parse_text(value: str, baseline_peak_bytes: int) -> Budget:
    text = value.strip()
    least = _LEAST.fullmatch(text)
    if least is not None:
        if least["share"] is None:
            return Budget(None, "min")
        if not least["percent"]:
            raise BudgetError(
                f"budget {_shortened(value)} cannot be understood: the least at no more than 33 % extra time "
                'is written "min@33%"'
            )
        return Budget(None, f"min@{least['share']}%", float(least["share"]) / 100)
    match = _AMOUNT.fullmatch(text)
    unit = match["unit"].lower() if match else ""
    if match is None or unit not in ("", "%", *_UNITS):
        hint = ""
        if match is not None and unit in ("k", "m", "g", "t"):
            written = match["number"] + unit.upper()
            hint = f"; write {written}iB (powers of 1024) or {written}B (powers of 1000)"
        raise BudgetError(f"budget {_shortened(value)} cannot be understood: expected {_FORMS}{hint}")
    amount = Fraction(match["sign"] + match["number"])
    if unit == "%":
        amount = min(amount * baseline_peak_bytes / 100, Fraction(_LARGEST_BYTES))
    elif unit:
        amount *= _UNITS[unit]
    elif amount.denominator != 1:
        raise BudgetError(f"budget {_shortened(value)} is not a whole number of bytes: expected {_FORMS}")
    return Budget(_checked(amount, _shortened(value)), text, relative=unit == "%")


def _checked(amount: Fraction, shown: str) -> int:
    if amount < 1:
        raise BudgetError(f"budget {shown} is not more than zero: expected {_FORMS}")
    if amount > _LARGEST_BYTES:
        raise BudgetError(f"budget {shown} is more than any machine has: expected {_FORMS}")
    return int(amount)


def _shortened(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")


def format_bytes(amount_bytes: int) -> str:
    """Write bytes for people: 512 B, 139.8 MiB, 57.5 GiB."""
    amount = abs(amount_bytes)
    sign = "-" if amount_bytes < 0 else ""
    if amount < 1024:
        return f"{sign}{amount} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    exponent = 1
    # From 1023.95 on, one digit after the point would show as 1024.0.
    while exponent < len(units) and amount / 1024**exponent >= 1023.95:
        exponent += 1
    return f"{sign}{amount / 1024**exponent:.1f} {units[exponent - 1]}"
