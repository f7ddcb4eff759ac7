"""A table of the plans of a sweep: the less memory, the more time."""

from collections.abc import Sequence

from rich.table import Table

from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.report.columns import fitted_table

_BAR = 30


def render_frontier(plans: Sequence[PlanRecord], *, width: int = 100) -> Table:
    """A row for each plan: its peak, the share of the unplanned step's, and its extra time as a bar."""
    longest = max((p.overhead for p in plans), default=0.0) or 1.0
    bar = _BAR if width >= 100 else 8
    rows = []
    for plan in plans:
        gap = plan.solver.gap
        rows.append(
            (
                format_bytes(plan.predicted.peak_bytes),
                format_bytes(plan.predicted.dynamic_peak_bytes),
                f"{plan.predicted.peak_bytes / plan.baseline.peak_bytes:.0%}",
                f"{plan.overhead:+.1%}",
                "" if gap is None else f"{gap:.2%}",
                ("█" * round(bar * max(plan.overhead, 0.0) / longest)).ljust(bar),
            )
        )
    headers = ("peak", "of the step", "of unplanned", "extra time", "at most slower by", "")
    return fitted_table(headers, rows, width=width, least=("at most slower by", "", "of the step"))
