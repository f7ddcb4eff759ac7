"""The outcome of a verification for a terminal."""

from typing import Protocol

from rich.console import Group
from rich.text import Text

from planner.errors import printable
from planner.planfile.budget import format_bytes
from planner.report.columns import fitted_table
from planner.report.text import format_seconds


class Verified(Protocol):
    """The part of `planner.verify`'s report that is shown."""

    @property
    def ok(self) -> bool: ...
    @property
    def loss_equal(self) -> bool: ...
    @property
    def gradients_equal(self) -> bool: ...
    @property
    def buffers_equal(self) -> bool: ...
    @property
    def rng_equal(self) -> bool: ...
    @property
    def measured_dynamic_peak_bytes(self) -> int: ...
    @property
    def predicted_dynamic_peak_bytes(self) -> int: ...
    @property
    def baseline_measured_dynamic_peak_bytes(self) -> int: ...
    @property
    def baseline_predicted_dynamic_peak_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def baseline_seconds(self) -> float: ...
    @property
    def overhead(self) -> float: ...
    @property
    def overheads(self) -> list[float]: ...
    @property
    def problems(self) -> list[str]: ...
    @property
    def unsplit_bytes(self) -> int: ...
    @property
    def baseline_unsplit_bytes(self) -> int: ...


def render_verification(report: Verified, *, width: int = 100) -> Group:
    """Lay out the report of a verification within a number of characters, for `rich.print`."""
    checks = {
        "loss": report.loss_equal,
        "gradients": report.gradients_equal,
        "buffers": report.buffers_equal,
        "random state": report.rng_equal,
    }
    verdict = Text(
        "verified" if report.ok else "NOT VERIFIED", style="bold green" if report.ok else "bold red"
    )
    same = Text(", ".join(f"{name} {'equal' if equal else 'DIFFER'}" for name, equal in checks.items()))
    sides = (
        (
            "unplanned",
            report.baseline_predicted_dynamic_peak_bytes,
            report.baseline_measured_dynamic_peak_bytes,
            report.baseline_seconds,
        ),
        ("planned", report.predicted_dynamic_peak_bytes, report.measured_dynamic_peak_bytes, report.seconds),
    )
    rows = [
        (
            name,
            format_bytes(predicted),
            format_bytes(measured),
            f"{measured / predicted:.4f}" if predicted else "-",
            format_seconds(seconds),
        )
        for name, predicted, measured, seconds in sides
    ]
    headers = ("", "predicted peak", "measured peak", "measured / predicted", "time")
    table = fitted_table(headers, rows, width=width, least=("measured / predicted", "predicted peak"))
    overhead = Text(f"{extra_time(report)}; peaks are over the entry of the step")
    lines = [overhead]
    if report.unsplit_bytes or report.baseline_unsplit_bytes:
        more = f"{format_bytes(report.baseline_unsplit_bytes)} and {format_bytes(report.unsplit_bytes)}"
        why = "with PYTORCH_ALLOC_CONF=expandable_segments:True there are none"
        counts = f"torch.cuda.max_memory_allocated counts {more} more"
        lines.append(Text(f"{counts}: bytes that the caching allocator does not split off its blocks; {why}"))
    problems = [Text(f"problem: {printable(problem)}", style="red") for problem in report.problems]
    return Group(verdict, same, Text(), table, *lines, *problems)


def extra_time(report: Verified) -> str:
    """The extra time of the planned step and its range over pairs of steps: single measurements are noisy."""
    if not report.overheads:
        return "no time was measured"
    pairs = sorted(report.overheads)
    text = f"extra time {report.overhead:+.1%}"
    if len(pairs) == 1:
        return f"{text} (one pair of steps: its error is unknown)"
    return f"{text} ({pairs[0]:+.1%} to {pairs[-1]:+.1%} in {len(pairs)} pairs of steps)"
