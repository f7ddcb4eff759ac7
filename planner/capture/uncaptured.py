"""Errors that say why nothing of a step could be captured, and what to do."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from planner._torch.execution.function_calls import DIFFERENTIATED_TWICE
from planner._torch.tracing.breaks import graph_breaks
from planner.capture.on_a_copy import NotWithoutDataError
from planner.errors import CaptureError
from planner.hooks.gradients_inside import CONNECTED_OUTSIDE
from planner.training_step.copies import described
from planner.training_step.recorder import Recording

_REMEDY = (
    "Plan it with backend='replay', or leave backend= out: the plan then follows the step as it is written. "
    "TORCH_LOGS=graph_breaks shows the lines that cannot be captured"
)

AROUND = (
    "Plan with backend='replay', or leave backend= out: the plan then follows the step as it is written. "
    "With regions=, put @torch.compiler.disable on the function that does this: it then runs as written, and "
    "the rest is planned"
)
"""The next step where eager runs and tracing does not."""

_IN_ONE_GRAPH = (
    "Change the lines that end them: requires_grad_() on an input ends one too, unless the forward itself "
    "calls it before it computes anything. Or plan with backend='replay', or submodules that are not "
    "differentiated inside of the forward"
)
"""The next step where gradients that a forward takes go through several graphs."""

_AS_IT_IS = (
    "Call the module as it is, with these inputs, and backward(): where that fails too, it says why; else "
    "plan submodules that leave out that line"
)
"""The next step where the step does not run under the recorder."""


_OF_GRADIENTS_INSIDE = ("double backward", "differentiated Tensor", DIFFERENTIATED_TWICE, CONNECTED_OUTSIDE)
"""Texts of errors of ``torch.autograd.grad`` inside of a forward that is captured."""


def failed(
    doing: str, error: Exception, graphs: Iterable[Any], *, with_data: bool, eager: bool
) -> CaptureError:
    """The CaptureError for a pass over the step that raised an error.

    Args:
        doing: The pass, as in "running the step".
        error: The error that it raised.
        graphs: The graphs that Dynamo has made.
        with_data: Whether it was a pass over a copy with data.
        eager: Whether the step runs without graphs.
    """
    text = described(doing, error)
    if "don't yet support saved tensor hooks" in text:
        return CaptureError(
            f"{text}. Replays do not follow torch.func, and no graph has a torch.autograd.Function "
            "inside of one. Take these gradients by torch.autograd.grad, or plan submodules without them"
        )
    if eager and any(sign in text for sign in _OF_GRADIENTS_INSIDE):
        places = graph_breaks.distinct_places(map(graph_breaks.break_reason, graphs))
        where = f" (one ended at {'; '.join(places[:3])})" if places else ""
        return CaptureError(
            f"{text}. The forward takes gradients of its own results, which is planned where one graph has "
            "all that they go through, and no autograd functions of its own if they are differentiated "
            f"again; here it was several graphs{where}. {_IN_ONE_GRAPH}"
        )
    kind = CaptureError if with_data else NotWithoutDataError
    return kind(f"{text}. {AROUND if eager else _AS_IT_IS}")


def refuse_second_backwards(recording: Recording, graphs: Sequence[torch.fx.GraphModule]) -> None:
    """Check that the backward of each part of the forward runs once.

    Raises:
        CaptureError: One runs again, as where both the forward and the loss differentiate a result: the
            second backward would miss values that the plan has freed.
    """
    halves = [e.graph for e in recording.events if e.graph is not None and e.graph.backward]
    ran = Counter((half.graph, half.instance) for half in halves)
    if again := sorted({graph for (graph, _), times in ran.items() if times > 1}):
        places = graph_breaks.distinct_places(graph_breaks.break_reason(graphs[i]) for i in again)
        where = f" (it ended at {places[0]})" if places else ""
        raise CaptureError(
            f"the backward of a part of the forward{where} runs twice, once by torch.autograd.grad or "
            "backward() inside of the step. The forward takes gradients of its own results, which is planned "
            f"where one graph has all that they go through; here it was several graphs. {_IN_ONE_GRAPH}"
        )


def always_different(graphs: Iterable[torch.fx.GraphModule]) -> CaptureError:
    """The error for a forward that takes another path with each run, and makes other graphs."""
    reason = next(filter(None, map(graph_breaks.break_reason, graphs)), None)
    where = "" if reason is None else f". A graph ended at {reason}"
    return CaptureError(
        "the module's forward captures differently every time it runs (Python state that changes with each "
        f"step?); it cannot be planned as it is{where}. {AROUND}"
    )


def nothing_captured(counted: dict[str, int]) -> CaptureError:
    """The error for a forward of which Dynamo made no graph.

    Args:
        counted: The earlier result of :func:`planner._torch.tracing.breaks.graph_breaks.counted_breaks`.
    """
    why = graph_breaks.new_break_reasons(counted)
    return CaptureError(
        "nothing of the module's forward could be captured, and torch.compile skips it too"
        f"{': ' + why[0] if why else ''}. {_REMEDY}"
    )


def nothing_differentiated(graphs: Iterable[Any], counted: dict[str, int]) -> CaptureError:
    """The error for a forward whose graphs all have nothing to differentiate.

    Args:
        graphs: The graphs that Dynamo made.
        counted: As for :func:`nothing_captured`.
    """
    places = graph_breaks.distinct_places(map(graph_breaks.break_reason, graphs))
    why = places or graph_breaks.new_break_reasons(counted)
    return CaptureError(
        "no part of the module's forward that gradients pass through could be captured"
        f"{': ' + '; '.join(why[:3]) if why else ''}. {_REMEDY}"
    )
