"""A comparison as a table."""

from rich.console import Group, RenderableType
from rich.text import Text

from planner.estimation.comparison import Comparison, Way
from planner.planfile.budget import format_bytes
from planner.report.columns import fitted_table
from planner.report.text import as_text, printable

_OVER = (
    "extra time is over the step as PyTorch runs it; that of a plan by itself (show, sweep) is over the\n"
    "captured step that recomputes nothing, which is a little faster"
)


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
