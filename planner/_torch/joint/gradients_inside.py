"""Gradients that a forward takes of its own results, and the inputs for which a graph gets them wrong.

A captured graph differentiates by its inputs as if these were independent. In eager, where one input was
computed from another, gradients flow from the one to the other. So a graph that differentiates by an input
must not get another input that was computed from it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from planner._torch.autograd import edge_of, edges_behind

_COPIES = {"CloneBackward0", "ViewBackward0"}

MEET_OUTSIDE = (
    "the forward takes gradients by a tensor, and another input of the same graph was computed from that "
    "tensor before the graph begins"
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


def meet_outside(args: Sequence[Any], by: Collection[int], *, siblings: bool = True) -> bool:
    """Whether an argument of a graph was computed from another one by which the graph differentiates.

    Args:
        args: The arguments.
        by: Positions of those by which it differentiates.
        siblings: Whether results of one autograd function count as computed from each other, and originals
            as their copies. The capture hands out copies (planner/capture/graphs/graph_runner.py).
    """
    starts = [edge_of(a) for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None] if by else []
    given = [args[i] for i in by] if starts else []
    wanted = {edge_of(a) for a in given if isinstance(a, torch.Tensor) and a.requires_grad}
    for start in starts:
        ends = wanted - {start}
        if siblings:
            ends |= {e for node, _ in ends if node.name() in _COPIES for e in node.next_functions}
        functions = {node for node, _ in ends if siblings and isinstance(node, BackwardCFunction)}
        if ends and any(edge in ends or edge[0] in functions for edge in edges_behind(start)):
            return True
    return False


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
