"""Why Dynamo ended a graph where it did, in a line that begins with the user's line of code."""

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.utils import counters

from planner._torch.tracing.inside_compile import A_REGION


def break_reason(graph: torch.fx.GraphModule) -> str | None:
    """Why Dynamo ended a graph where it did; None where the forward ended, or a region of the plan begins."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = str(reason.reason)
    return None if text.startswith(A_REGION) else _with_line(text, reason.user_stack)


def reason_of_error(error: Unsupported | UserError) -> str:
    """Why Dynamo cannot follow a forward."""
    return _with_line(str(error.msg), getattr(error, "real_stack", None))


def _with_line(reason: str, stack: Any) -> str:
    """The first line of a reason, after the innermost line of the user's: ``file:12 (code): reason``."""
    text = next((line for line in reason.splitlines() if line.strip()), "graph break")
    frames = [f for f in stack or () if "/torch/" not in f.filename and not f.filename.endswith(_CALLER)]
    if not frames:
        return text.strip()
    last = frames[-1]
    return f"{last.filename}:{last.lineno} ({(last.line or last.name).strip()}): {text.strip()}"


_CALLER = "planner/capture/module_calls.py"
"""The file of the function that a capture compiles: it calls the module's forward, and is no user's."""


def distinct_places(reasons: Iterable[str | None]) -> list[str]:
    """The first reason at each line of code, of reasons as :func:`break_reason` gives them."""
    first: dict[str, str] = {}
    for reason in reasons:
        if reason is not None:
            first.setdefault(reason.partition(" (")[0], reason)  # the file and the number of the line
    return list(first.values())


def counted_breaks() -> dict[str, int]:
    """How often Dynamo has met each reason to end a graph in this process."""
    return dict(counters["graph_break"])


def new_break_reasons(before: dict[str, int]) -> list[str]:
    """The first line of each reason that Dynamo has met since :func:`counted_breaks` returned ``before``."""
    new = [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]
    return [line for reason in new for line in reason.strip().splitlines()[:1]]
