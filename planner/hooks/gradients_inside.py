"""A graph that calls ``torch.autograd.grad`` runs as written where a gradient may lead outside of the graph.

A captured graph takes gradients with respect to its inputs as if these were independent. Say ``x`` and ``y``
are inputs, and ``y`` was computed from ``x`` before the graph begins: a gradient with respect to ``x`` would
lack the part that goes through ``y``.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch.execution.checkpoints import as_written
from planner._torch.pytree import tree_leaves
from planner.compiled.graph_hook import GraphHook, HookContext

CONNECTED_OUTSIDE = (
    "the forward takes gradients by a tensor, and another input of the same graph is the result of a "
    "computation, which may have used that tensor before the graph begins"
)


def differentiated_inputs(graph: GraphModule) -> frozenset[int]:
    """Positions of the inputs of a Dynamo graph with respect to which the graph itself takes gradients."""
    places = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    found: set[int] = set()
    for node in graph.graph.nodes:
        if node.target is torch.autograd.grad:
            inputs = node.args[1] if len(node.args) > 1 else node.kwargs.get("inputs")
            found.update(places[n] for n in map(_origin, tree_leaves(inputs)) if n in places)
        elif node.op == "get_attr" and _differentiates(getattr(graph, str(node.target), None)):
            # The body of a checkpoint, say. Its inputs are not traced back to the graph's: any may be one.
            found.update(places.values())
    return frozenset(found)


def may_be_connected_outside(args: Sequence[Any], differentiated: Collection[int]) -> bool:
    """Whether an argument of a graph may be computed from a differentiated one.

    Args:
        args: The graph's arguments.
        differentiated: Positions of those with respect to which the graph takes gradients.
    """
    if not differentiated:
        return False
    # Only a tensor with a history can have been computed from one that requires a gradient.
    results = {i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.grad_fn is not None}
    return any(
        results - {i} and isinstance(args[i], torch.Tensor) and args[i].requires_grad for i in differentiated
    )


class GradientsInside(GraphHook):
    """Runs the graph as written in each call whose arguments may be connected outside of the graph.

    Args:
        graph: The captured forward.
        warn: Called, once, when the graph runs as written.
    """

    def __init__(self, graph: GraphModule, warn: Callable[[str], None]) -> None:
        self._graph, self._warn = graph, warn
        self._differentiated = differentiated_inputs(graph)
        self.watches, self._warned = bool(self._differentiated), False

    def instead(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if not may_be_connected_outside(args, self._differentiated):
            return None
        if not self._warned:
            self._warned = True
            self._warn(
                f"{CONNECTED_OUTSIDE}: that part runs without the plan, and the step may exceed the budget. "
                "Compute both in that graph, or plan with backend='replay'"
            )
        return as_written(self._graph).forward


def hook(context: HookContext) -> GradientsInside:
    """A hook for every graph; it does nothing where the graph takes no gradients."""
    return GradientsInside(context.graph, context.warn)


def _origin(node: Any) -> Any:
    """The node of the tensor itself: ``x.requires_grad_()`` returns ``x``."""
    while isinstance(node, Node) and node.op == "call_method" and node.target == "requires_grad_":
        node = node.args[0]
    return node


def _differentiates(part: Any) -> bool:
    """Whether an attribute of a graph is a graph that takes gradients, itself or in a part of its own."""
    return isinstance(part, GraphModule) and any(
        node.target is torch.autograd.grad
        for inner in part.modules()
        if isinstance(inner, GraphModule)
        for node in inner.graph.nodes
    )
