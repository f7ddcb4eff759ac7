"""What memory costs in time: the plans of a sweep side by side."""

from collections.abc import Sequence

from rich.table import Table

from planner.budget import format_bytes
from planner.plan_file import Plan

_BAR = 30


def render_frontier(plans: Sequence[Plan]) -> Table:
    """A row a plan: its peak, its share of the unplanned step's, and its extra time as a bar."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("peak", "of the step", "of unplanned", "extra time", "at most slower by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    longest = max((p.overhead for p in plans), default=0.0) or 1.0
    for plan in plans:
        gap = plan.solver.gap
        table.add_row(
            format_bytes(plan.predicted.peak_bytes),
            format_bytes(plan.predicted.dynamic_peak_bytes),
            f"{plan.predicted.peak_bytes / plan.baseline.peak_bytes:.0%}",
            f"{plan.overhead:+.1%}",
            "" if gap is None else f"{gap:.2%}",
            "█" * round(_BAR * max(plan.overhead, 0.0) / longest),
        )
    return table
