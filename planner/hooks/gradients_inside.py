"""A graph that differentiates by an input runs as written if another input was computed from that one.

The graph's gradient lacks the part that goes through the other input. Traced graphs are right only where the
two are independent (:mod:`planner._torch.joint.gradients_inside`).
"""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from planner._torch.execution.checkpoints import as_written
from planner._torch.joint.gradients_inside import MEET_OUTSIDE, differentiated_inputs, meet_outside
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.dynamo_graph import structure_of


class GradientsInside(GraphHook):
    """Looks, at every call, what the arguments were computed from.

    Args:
        graph: The captured forward.
        planned: Whether the plan has this graph. Planning then saw how results of earlier graphs depend on
            each other.
        warn: Called, once, when the graph runs as written.
    """

    def __init__(self, graph: GraphModule, planned: bool, warn: Callable[[str], None]) -> None:
        self._graph, self._planned, self._warn = graph, planned, warn
        self._differentiated = differentiated_inputs(graph)
        self.watches, self._warned = bool(self._differentiated), False

    def instead(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if not meet_outside(args, self._differentiated, siblings=not self._planned):
            return None
        if not self._warned:
            self._warned = True
            self._warn(
                f"{MEET_OUTSIDE}: that part runs without the plan, and the step may exceed the budget. "
                "Compute both in that graph, or plan the parts of the module apart"
            )
        return as_written(self._graph).forward


def hook(context: HookContext) -> GradientsInside:
    """For every graph; it does nothing where the graph differentiates by no input."""
    structure = structure_of(context.graph)
    planned = any(record.structure == structure for record in context.plan.graphs)
    return GradientsInside(context.graph, planned, context.warn)
