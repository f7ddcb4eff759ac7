"""The outcome of a verification for a terminal."""

from typing import Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.budget import format_bytes
from planner.report.text import format_seconds, printable


class Verified(Protocol):
    """What `planner.verify` returns, as far as it is shown."""

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
    def problems(self) -> list[str]: ...


def render_verification(report: Verified) -> Group:
    """Lay out what a verification found, for `rich.print`."""
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
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("predicted peak", "measured peak", "measured / predicted", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = (
        (
            "unplanned",
            report.baseline_predicted_dynamic_peak_bytes,
            report.baseline_measured_dynamic_peak_bytes,
            report.baseline_seconds,
        ),
        ("planned", report.predicted_dynamic_peak_bytes, report.measured_dynamic_peak_bytes, report.seconds),
    )
    for name, predicted, measured, seconds in rows:
        ratio = f"{measured / predicted:.4f}" if predicted else "-"
        table.add_row(name, format_bytes(predicted), format_bytes(measured), ratio, format_seconds(seconds))
    overhead = Text(f"extra time {report.overhead:+.1%}; peaks are over the entry of the step")
    problems = [Text(f"problem: {printable(problem)}", style="red") for problem in report.problems]
    return Group(verdict, same, Text(), table, overhead, *problems)
