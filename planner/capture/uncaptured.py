"""Errors that say why nothing of a step could be captured, and what to do."""

from collections.abc import Iterable
from typing import Any

from planner._torch.tracing.breaks import graph_breaks
from planner.errors import CaptureError

_REMEDY = (
    "TORCH_LOGS=graph_breaks shows the lines; move what cannot be captured out of the forward, or plan the "
    "submodules that can"
)


AROUND = (
    "Put @torch.compiler.disable on the function that does this, or set module.forward = "
    "torch.compiler.disable(module.forward) for the part: it then runs as written, and the rest is planned"
)
"""What to do where eager runs and tracing does not."""


def always_different(where: str) -> CaptureError:
    """The error for a forward that takes another path with each run; ``where`` it ended a graph."""
    return CaptureError(
        "the module's forward captures differently every time it runs (Python state that changes with each "
        f"step?); it cannot be planned as it is{where}. {AROUND}"
    )


def nothing_captured(counted: dict[str, int]) -> CaptureError:
    """The error for a forward of which no graph came.

    Args:
        counted: What :func:`planner._torch.tracing.breaks.graph_breaks.counted_breaks` returned before.
    """
    why = graph_breaks.new_break_reasons(counted)
    return CaptureError(
        "nothing of the module's forward could be captured, and torch.compile skips it too"
        f"{': ' + why[0] if why else ''}. {_REMEDY}"
    )


def nothing_differentiated(graphs: Iterable[Any], counted: dict[str, int]) -> CaptureError:
    """The error for a forward of which only graphs came that have nothing to differentiate.

    Args:
        graphs: The graphs that Dynamo made.
        counted: What :func:`planner._torch.tracing.breaks.graph_breaks.counted_breaks` returned before.
    """
    places = graph_breaks.distinct_places(map(graph_breaks.break_reason, graphs))
    why = places or graph_breaks.new_break_reasons(counted)
    return CaptureError(
        "no part of the module's forward that gradients pass through could be captured"
        f"{': ' + '; '.join(why[:3]) if why else ''}. {_REMEDY}"
    )
