"""A backward returns its gradients as tensors that are no views.

The engine adds a later gradient to the earlier one in place, if nobody else holds the earlier one's memory.
To a view nothing is added in place, as its base is held too: that takes one tensor more. A graph may return a
view where eager returns none, such as a sum that was written into a view at its last use.
"""

import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from planner._torch import fake
from planner._torch.operators import returns_no_views
from planner.graph.dying_operands import writing
from planner.graph.in_place import operator_in_place
from planner.graph.passes.in_place_accumulation import is_sum_in_place, leaves_as_view

aten = torch.ops.aten


def hand_out_no_views(graph: FxGraph) -> None:
    """Detach the gradients that a graph makes and returns as views, unless they are views in eager too.

    Args:
        graph: A backward, of operator calls whose nodes carry their values as ``meta["val"]``.
    """
    output = graph.output_node()
    given = {
        fake.storage_key(node.meta["val"])
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    times = Counter(result for result in results if isinstance(result, Node))
    with graph.inserting_before(output):
        instead = {
            node: _no_view(graph, node)
            for node, count in times.items()
            if count == 1 and _may_be_view(node, given)
        }
    output.args = ([instead.get(result, result) for result in results],)


def _no_view(graph: FxGraph, node: Node) -> Node:
    # For autograd a detached tensor is no view, even if it is detached from one.
    detached = graph.call_function(aten.detach.default, (node,))
    detached.meta = {"val": node.meta["val"]}  # without the node's marks, which are for passes
    return detached


def _may_be_view(node: Node, given: set[int]) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or leaves_as_view(node):
        return False
    if value.layout is not torch.strided or fake.storage_key(value) in given:
        return False
    if operator_in_place(node) or writing(node) or is_sum_in_place(node):
        return True
    made: Node = node
    while made.target is operator.getitem:
        made = made.args[0]  # type: ignore[assignment]
    return not returns_no_views(made.target) and not _is_part(value)


def _is_part(value: torch.Tensor) -> bool:
    """Whether a tensor views a part of a storage: then eager's is a view too, as parts of a stack are."""
    own = fake.concrete_size(value.numel()) * value.element_size()
    return own < fake.storage_bytes(value)
