"""Batches within a budget: the largest, the fastest, and those between."""

from typing import TYPE_CHECKING

from rich.table import Table

from planner.budget import format_bytes

if TYPE_CHECKING:
    from planner.batch_search import MaxBatch


def render_batches(found: "MaxBatch") -> Table:
    """A row a batch: what it takes of the device and how fast it is; the largest unplanned one first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("batch", "of unplanned", "memory", "samples/s", "time per sample"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    rows = [] if found.unplanned is None else [(found.unplanned, "largest without a plan")]
    for point in found.points:
        remarks = ["fastest"] if point is found.fastest else []
        remarks += ["largest"] if point.batch == found.batch else []
        rows.append((point, ", ".join(remarks) + ("" if point.captured else " (estimated)")))
    for point, remark in rows:
        ratio = f"{point.batch / found.unplanned.batch:.2f}x" if found.unplanned else ""
        table.add_row(
            str(point.batch),
            ratio,
            format_bytes(point.total_bytes),
            f"{point.samples_per_second:,.1f}",
            f"{point.overhead:+.1%}",
            remark.strip(),
        )
    return table
