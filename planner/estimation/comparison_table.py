"""A comparison: its records, and its table."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.errors import printable
from planner.planfile.budget import format_bytes
from planner.report.columns import fitted_table
from planner.report.text import as_text

_OVER = (
    "extra time is over the step as PyTorch runs it; that of a plan by itself (show, sweep) is over the\n"
    "captured step that recomputes nothing, which is a little faster"
)


@dataclass(frozen=True)
class Way:
    """One way to run the step.

    Attributes:
        name: Its name in the table.
        peak_bytes: Predicted peak of forward and backward, resident bytes included; None: not predicted.
        overhead: Predicted extra time over the unplanned step: 0.05 is 5 %.
        fits: Whether that is within the budget.
        measured_peak_bytes: The same peak, measured; None where nothing was measured.
        measured_seconds: Median seconds of the measured steps.
        measured_overhead: Extra time over the unplanned step as measured.
        note: Why there is no figure.
    """

    name: str
    peak_bytes: int | None = None
    overhead: float | None = None
    fits: bool | None = None
    measured_peak_bytes: int | None = None
    measured_seconds: float | None = None
    measured_overhead: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Ways to run one step, the unplanned one first.

    Attributes:
        budget: As it was written.
        budget_bytes: Its bytes; None for the least peak.
        ways: One row each.
    """

    budget: str
    budget_bytes: int | None
    ways: list[Way]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return comparison_text(self)


def render_comparison(found: Comparison, *, width: int = 100) -> Group:
    """A row for each way: predicted and, where that was asked for, measured; those that fit are marked."""
    measured = any(way.measured_peak_bytes is not None for way in found.ways)
    headers = ["", "predicted peak", "extra time", "fits"]
    headers += ["measured peak", "measured time"] if measured else []
    rows = [_cells(way, measured) for way in found.ways]
    table = fitted_table(headers, rows, width=width, least=("fits",))
    budget = f"budget {found.budget}"
    if found.budget_bytes is not None:
        budget += f", {format_bytes(found.budget_bytes)}"
    parts: list[RenderableType] = [Text(printable(budget), style="bold"), table]
    parts += [Text(printable(f"{way.name}: {way.note}")) for way in found.ways if way.note]
    parts.append(Text(_OVER))
    return Group(*parts)


def comparison_text(found: Comparison) -> str:
    """The comparison as text."""
    return as_text(render_comparison(found, width=110), width=110)


def _cells(way: Way, measured: bool) -> tuple[Text | str, ...]:
    cells = [
        "-" if way.peak_bytes is None else format_bytes(way.peak_bytes),
        "-" if way.overhead is None else f"{way.overhead:+.1%}",
        {True: "yes", False: "no", None: "-"}[way.fits],
    ]
    if measured:
        peak, overhead = way.measured_peak_bytes, way.measured_overhead
        cells += [
            "-" if peak is None else format_bytes(peak),
            "-" if overhead is None else f"{overhead:+.1%}",
        ]
    return (Text(printable(way.name)), *cells)
