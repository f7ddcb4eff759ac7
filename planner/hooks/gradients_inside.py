"""A graph that differentiates by an input runs as written if another input may be computed from that one.

A captured graph differentiates by its inputs as if these were independent. Where one was computed from
another, its gradient would lack the part that goes through the other.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch.execution.checkpoints import as_written
from planner._torch.pytree import tree_leaves
from planner.compiled.graph_hook import GraphHook, HookContext

MEET_OUTSIDE = (
    "the forward takes gradients by a tensor, and another input of the same graph is the result of a "
    "computation, which may have used that tensor before the graph begins"
)


def differentiated_inputs(graph: GraphModule) -> frozenset[int]:
    """Positions of the inputs of a Dynamo graph by which it differentiates."""
    places = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    found: set[int] = set()
    for node in graph.graph.nodes:
        if node.target is torch.autograd.grad:
            by = node.args[1] if len(node.args) > 1 else node.kwargs.get("inputs")
            found.update(places[n] for n in map(_origin, tree_leaves(by)) if n in places)
        elif node.op == "get_attr" and _differentiates(getattr(graph, str(node.target), None)):
            found.update(places.values())  # in a part of the graph, with names of its own
    return frozenset(found)


def meet_outside(args: Sequence[Any], by: Collection[int]) -> bool:
    """Whether an argument of a graph may be computed from another one by which the graph differentiates.

    Args:
        args: The arguments.
        by: Positions of those by which it differentiates.
    """
    results = {i for i, a in enumerate(args) if by and isinstance(a, torch.Tensor) and a.grad_fn is not None}
    return any(results - {i} and isinstance(args[i], torch.Tensor) and args[i].requires_grad for i in by)


class GradientsInside(GraphHook):
    """Looks, at every call, whether arguments are results.

    Args:
        graph: The captured forward.
        warn: Called, once, when the graph runs as written.
    """

    def __init__(self, graph: GraphModule, warn: Callable[[str], None]) -> None:
        self._graph, self._warn = graph, warn
        self._differentiated = differentiated_inputs(graph)
        self.watches, self._warned = bool(self._differentiated), False

    def instead(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if not meet_outside(args, self._differentiated):
            return None
        if not self._warned:
            self._warned = True
            self._warn(
                f"{MEET_OUTSIDE}: that part runs without the plan, and the step may exceed the budget. "
                "Compute both in that graph, or plan with backend='replay'"
            )
        return as_written(self._graph).forward


def hook(context: HookContext) -> GradientsInside:
    """For every graph; it does nothing where the graph differentiates by no input."""
    return GradientsInside(context.graph, context.warn)


def _origin(node: Any) -> Any:
    while isinstance(node, Node) and node.op == "call_method" and node.target == "requires_grad_":
        node = node.args[0]
    return node


def _differentiates(part: Any) -> bool:
    return isinstance(part, GraphModule) and any(
        node.target is torch.autograd.grad
        for inner in part.modules()
        if isinstance(inner, GraphModule)
        for node in inner.graph.nodes
    )
