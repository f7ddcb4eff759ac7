"""A plan as a figure, by matplotlib, which is imported when one is drawn."""

import io
import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from planner.errors import PlannerError, printable
from planner.planfile.atomic_file import check_writable, replace_atomically
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord, Timeline
from planner.report.modules import folded_holders

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

_UNPLANNED, _PLANNED, _BUDGET = "#b0a08a", "#1f6f8b", "#c0392b"
_INK, _PAPER = "#1b1f24", "#ffffff"
_TEXT = 13
"""Points: legible where the figure is shown at half its size."""
_ON_DARK = {_INK: "#e6e9ed", _PAPER: "#14181d", _PLANNED: "#5cb8d6", _BUDGET: "#ff8a80", "#cccccc": "#3a434d"}
"""Colours of a vector figure where the reader's pages are dark."""
_MIB = 2**20


class PlottingError(PlannerError):
    """A figure cannot be drawn: matplotlib is missing, or the file's format is not one it writes."""


def draw(plan: PlanRecord, *, most_modules: int = 8) -> "Figure":
    """Draw live bytes over the step, planned and unplanned, and what is alive at the planned peak.

    Args:
        plan: The plan.
        most_modules: How many modules to name; the others are one bar.

    Raises:
        PlottingError: matplotlib is not installed.
    """
    figure_class = _figure_class()
    figure: Figure = figure_class(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_timelines(left, plan)
    _draw_holders(right, plan, most_modules)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=_TEXT)
    _in_ink(figure)
    return figure


def check_figure(path: str | os.PathLike[str]) -> None:
    """Check, before long work, that a figure can be drawn and written after it.

    Raises:
        PlottingError: matplotlib is not installed, or the name ends in no known format.
        PlanFileError: The file cannot be written.
    """
    _format(path)
    _figure_class()
    check_writable(path)


def save(plan: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Draw a plan into a file, whole or not at all. Its ending names the format: .png, .svg or .pdf.

    Raises:
        PlottingError: As `check_figure`.
        PlanFileError: The file cannot be written.
    """
    kind = _format(path)
    _write(draw(plan), path, kind)


def _write(figure: "Figure", path: str | os.PathLike[str], kind: str) -> None:
    from matplotlib import rc_context

    # Without a date and with fixed names the same plan gives the same file.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]

    def write(file: IO[bytes]) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
        drawn = buffer.getvalue()
        file.write(
            drawn.replace(b"<defs>", _dark_style().encode() + b"<defs>", 1) if kind == "svg" else drawn
        )

    with rc_context({"svg.hashsalt": "planner"}):
        replace_atomically(path, write)


def _in_ink(figure: "Figure") -> None:
    """Give texts, frames and ticks a colour that nothing else in the file has, for `_ON_DARK` to replace."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for text in (text for legend in legends if legend is not None for text in legend.get_texts()):
        text.set_color(_INK)
    for axes in figure.axes:
        axes.tick_params(colors=_INK, labelsize=_TEXT - 1)
        axes.spines[:].set_color(_INK)
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
            text.set_color(_INK)
            text.set_fontsize(_TEXT)


def _dark_style() -> str:
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in _ON_DARK.items()
        for kind in ("fill", "stroke")
    ]
    return f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>\n"


def draw_frontier(plans: Sequence[PlanRecord]) -> "Figure":
    """Draw the extra time over the peak, a point for each plan.

    Raises:
        PlottingError: matplotlib is not installed.
    """
    figure: Figure = _figure_class()(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = sorted((plan.predicted.peak_bytes, plan.overhead) for plan in plans)
    axes.plot(_mib([p for p, _ in points]), [100 * o for _, o in points], "o-", color=_PLANNED, label="plans")
    if plans:
        unplanned = plans[0].baseline.peak_bytes
        label = f"unplanned: {format_bytes(unplanned)}"
        axes.axvline(unplanned / _MIB, color=_UNPLANNED, linestyle="--", label=label)
        axes.legend()
    axes.set_xlabel("peak in MiB")
    axes.set_ylabel("extra time in %")
    axes.set_ylim(bottom=min(0.0, *(100 * o for _, o in points)) if points else 0.0)
    axes.grid(alpha=0.3)
    _in_ink(figure)
    return figure


def save_frontier(plans: Sequence[PlanRecord], path: str | os.PathLike[str]) -> None:
    """Draw the plans of a sweep into a file, as :func:`save` draws one plan."""
    kind = _format(path)
    _write(draw_frontier(plans), path, kind)


def _format(path: str | os.PathLike[str]) -> str:
    ending = os.path.splitext(os.fspath(path))[1].lower().removeprefix(".")
    if ending not in FORMATS:
        raise PlottingError(
            f"{os.fspath(path)}: a figure's name ends in {', '.join('.' + f for f in FORMATS)}"
        )
    return ending


def _figure_class() -> Any:
    try:
        # Not through pyplot, which keeps figures in global state and picks a window system.
        from matplotlib.figure import Figure
    except ImportError:
        message = "figures need matplotlib: pip install 'torch-checkpoint-planner[plot]'"
        raise PlottingError(message) from None
    return Figure


def _draw_timelines(axes: "Axes", plan: PlanRecord) -> None:
    resident = plan.resident.total
    for timeline, colour, label in (
        (plan.baseline_timeline, _UNPLANNED, "unplanned"),
        (plan.timeline, _PLANNED, "planned"),
    ):
        peak = max(timeline.bytes)
        axes.fill_between(_steps(timeline), [0, *_mib(timeline.bytes)], color=colour, alpha=0.35, step="pre")
        axes.step(
            _steps(timeline),
            [0, *_mib(timeline.bytes)],
            color=colour,
            where="pre",
            label=f"{label}: {format_bytes(peak)}",
        )
    budget_bytes = plan.target.budget_bytes
    if budget_bytes is not None:
        dynamic = budget_bytes - resident
        axes.axhline(dynamic / _MIB, color=_BUDGET, linestyle="--", label=f"budget: {format_bytes(dynamic)}")
    axes.axvline(1, color=_INK, linewidth=0.5)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("live MiB over the entry of the step")
    axes.set_title(f"{format_bytes(resident)} resident besides, {plan.overhead:+.1%} time", fontsize=_TEXT)


def _draw_holders(axes: "Axes", plan: PlanRecord, most: int) -> None:
    holders = folded_holders(plan, most)
    # A dollar sign would start a formula.
    names = [_shortened(printable(holder.module)).replace("$", r"\$") for holder in holders]
    axes.barh(range(len(names)), _mib([holder.bytes for holder in holders]), color=_PLANNED)
    axes.set_yticks(range(len(names)), names, fontsize=_TEXT - 1)
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.set_title("alive at the planned peak", fontsize=_TEXT)


def _shortened(path: str) -> str:
    # The end of a module's path says most.
    parts = path.split(".")
    while len(parts) > 1 and len(".".join(parts)) > 30:
        parts = parts[1:]
    short = ".".join(parts)
    return short if short == path else f"... {short[-60:]}"


def _steps(timeline: Timeline) -> list[float]:
    # Forward and backward take one unit each, so that timelines of different lengths compare.
    forward, backward = timeline.forward_length, len(timeline.bytes) - timeline.forward_length
    ends = [(index + 1) / forward for index in range(forward)]
    return [0.0, *ends, *(1 + (index + 1) / backward for index in range(backward))]


def _mib(values: list[int]) -> list[float]:
    return [value / _MIB for value in values]
