"""Why Dynamo ended a graph where it did."""

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.utils import counters

from planner._torch.tracing.inside_compile import A_REGION


def break_reason(graph: torch.fx.GraphModule) -> str | None:
    """Why Dynamo ended a graph where it did, with the line of the user's; None where the code ended, or a
    region of the plan begins."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return None if str(reason.reason).startswith(A_REGION) else _told(str(reason.reason), reason.user_stack)


def reason_of(error: Unsupported | UserError) -> str:
    """Why Dynamo cannot follow a forward, with the line of the user's."""
    return _told(str(error.msg), getattr(error, "real_stack", None))


def _told(reason: str, stack: Any) -> str:
    text = next((line for line in reason.splitlines() if line.strip()), "graph break")
    frames = [f for f in stack or () if "/torch/" not in f.filename and not f.filename.endswith(_CALLER)]
    if not frames:
        return text.strip()
    last = frames[-1]
    return f"{last.filename}:{last.lineno} ({(last.line or last.name).strip()}): {text.strip()}"


_CALLER = "planner/capture/module_calls.py"
"""The file of what is captured for a module, which calls its forward."""


def distinct_places(reasons: Iterable[str | None]) -> list[str]:
    """For each line of code the first of its reasons, as :func:`break_reason` gives them."""
    first: dict[str, str] = {}
    for reason in reasons:
        if reason is not None:
            first.setdefault(reason.partition(" (")[0], reason)
    return list(first.values())


def counted_breaks() -> dict[str, int]:
    """How often Dynamo met each reason to end a graph, so far."""
    return dict(counters["graph_break"])


def new_break_reasons(before: dict[str, int]) -> list[str]:
    """The reasons that it met since, the first line of each."""
    new = [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]
    return [line for reason in new for line in reason.strip().splitlines()[:1]]
