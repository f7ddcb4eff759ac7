"""A plan as one HTML file that needs nothing else: the page, its data, and uPlot, which draws."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from planner.errors import printable
from planner.planfile.plan import PlanRecord
from planner.report.page.data import page_data

_POLICY = "default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
"""A page may load nothing: a script that got into it could send nothing anywhere."""


def page(plan: PlanRecord, frontier: Sequence[PlanRecord] = ()) -> str:
    """The page of a plan.

    Args:
        plan: The plan.
        frontier: Plans of a sweep of the same model.

    Raises:
        PlanFileError: The plan does not say what its operations read, as those of earlier releases.
    """
    data = json.dumps(_visible(page_data(plan, frontier)), separators=(",", ":"), allow_nan=False)
    parts = {
        "policy": _POLICY,
        "title": escape(printable(plan.model.class_name)),
        "styles": _asset("uPlot.min.css") + _asset("page.css"),
        "licence": escape(_asset("uPlot.LICENSE")).replace("--", "- -"),
        # Inside a script nothing may look like the end of one; names are from files.
        "data": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "library": _asset("uPlot.iife.min.js"),
        "script": _asset("format.js") + _asset("timeline.js") + _asset("tables.js"),
    }
    text = _asset("page.html")
    pieces = text.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _visible(data: Any) -> Any:
    """Plain data with all of its texts made visible."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {name: _visible(value) for name, value in data.items()}
    return [_visible(value) for value in data] if isinstance(data, list) else data


def _asset(name: str) -> str:
    return (files("planner.report.page") / name).read_text(encoding="utf-8")
