"""A small timeline as SVG, for a notebook: no script, no library."""

from html import escape

from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord, Timeline

_WIDTH, _HEIGHT, _LEFT = 640, 150, 4
"""The right edge, lower edge and left edge of the curves, in units of the SVG's view box."""
_UNPLANNED, _PLANNED, _BUDGET = "#9a8a70", "#2b8fb3", "#d0453a"
"""Colours of the lines and of their keys."""


def small_timeline(plan: PlanRecord) -> str:
    """Dynamic bytes over the step, planned and unplanned, and what the budget leaves for them, as SVG.

    The budget's line is left out where it lies above the curves.
    """
    budget = plan.target.budget_bytes
    room = None if budget is None else budget - plan.resident.total
    unplanned, planned = plan.baseline.dynamic_peak_bytes, plan.predicted.dynamic_peak_bytes
    top = max(unplanned, planned, 1) * 1.05  # bytes at the upper edge
    parts = [
        f'<path d="{_path(plan.baseline_timeline, top)}" fill="none" stroke="{_UNPLANNED}" '
        'stroke-dasharray="3 3"/>',
        f'<path d="{_path(plan.timeline, top)} V {_HEIGHT} H {_LEFT} Z" fill="{_PLANNED}" '
        f'fill-opacity=".35" stroke="{_PLANNED}"/>',
    ]
    keys = [
        (_UNPLANNED, f"unplanned (dotted), at most {format_bytes(unplanned)}"),
        (_PLANNED, f"planned, at most {format_bytes(planned)}"),
    ]
    if room is not None and 0 < room <= top:
        y = _HEIGHT * (1 - room / top)
        parts.append(
            f'<path d="M {_LEFT} {y:.1f} H {_WIDTH}" stroke="{_BUDGET}" stroke-dasharray="10 4" fill="none"/>'
        )
        keys.append((_BUDGET, f"budget (dashed), {format_bytes(room)}"))
    middle = (_LEFT + _WIDTH) / 2  # where the backward begins
    parts.append(f'<path d="M {middle} 0 V {_HEIGHT}" stroke="#888" stroke-width=".5"/>')
    spans = "; ".join(f'<tspan fill="{colour}">{escape(text)}</tspan>' for colour, text in keys)
    return (
        f'<svg viewBox="0 0 {_WIDTH + 4} {_HEIGHT + 24}" width="100%" style="max-width: 44em" role="img" '
        f'aria-label="{escape("; ".join(text for _, text in keys))}">{"".join(parts)}'
        f'<text x="{_LEFT}" y="{_HEIGHT + 17}" font-size="12" font-family="sans-serif">{spans}</text></svg>'
    )


def _path(timeline: Timeline, top: float) -> str:
    """The steps of a timeline as path data: up or down to an operation's bytes, then on to where it ends."""
    # Forward and backward take half the width each, so that timelines of different lengths compare.
    forward, count = timeline.forward_length, len(timeline.bytes)
    half = (_WIDTH - _LEFT) / 2
    ends = [_LEFT + half * (i + 1) / forward for i in range(forward)]
    ends += [_LEFT + half + half * (i + 1) / (count - forward) for i in range(count - forward)]
    steps = (
        f"V {_HEIGHT * (1 - size / top):.1f} H {end:.1f}"
        for size, end in zip(timeline.bytes, ends, strict=True)
    )
    return " ".join([f"M {_LEFT} {_HEIGHT}", *steps])
