"""A table of batches within a budget: without a plan, the fastest, and the largest at several overheads."""

from collections.abc import Sequence
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from planner.planfile.budget import format_bytes
from planner.report.columns import Cell, fitted_table


class Batches(Protocol):
    """The part of `planner.max_batch`'s result that the table shows."""

    @property
    def choices(self) -> Sequence[Any]: ...
    @property
    def largest(self) -> Any: ...
    @property
    def unplanned(self) -> Any: ...


def render_batches(found: Batches, *, width: int = 100) -> Table:
    """A row for each batch: its memory on the device and its speed; the one that was planned is marked."""
    names: dict[tuple[int, bool], list[str]] = {}
    points = {}
    for choice in found.choices:
        key = (choice.point.batch, choice.point.planned)
        names.setdefault(key, []).append(choice.name)
        points[key] = choice.point
    on_gpu = any(point.total_bytes != point.allocated_bytes for point in points.values())
    rows: list[list[Cell]] = []
    for key, point in points.items():
        label = Text(", ".join(names[key]).replace(", largest at", " and"))
        if point == found.largest:
            label = Text(f"{label.plain} (planned)", style="bold")
        rows.append(
            [
                label,
                ("" if point.captured else "about ") + str(point.batch),
                f"{point.batch / found.unplanned.batch:.2f}x" if found.unplanned else "",
                format_bytes(point.total_bytes),
                *(
                    [format_bytes(point.reserved_bytes), format_bytes(point.allocated_bytes)]
                    if on_gpu
                    else []
                ),
                f"{point.samples_per_second:,.1f}",
                f"{point.overhead:+.1%}",
            ]
        )
    apart = ("reserved", "allocated") if on_gpu else ()
    headers = ("", "batch", "of unplanned", "memory", *apart, "samples/s", "time per sample")
    least = ("memory", "of unplanned", "samples/s", "allocated", "reserved")
    return fitted_table(headers, rows, width=width, least=least)
