"""Gradients that a backward returns, so that the autograd engine adds to them as eager's does.

The engine adds a gradient that arrives later to the earlier one in place, if nobody else holds the earlier
one's memory. A view is held together with what it looks at: to it nothing is added in place, which takes a
tensor more. What a graph makes may be a view where eager's gradient is none, as a sum that was written into a
view whose use was the last.
"""

import operator

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
    """Return the gradients that the graph makes as tensors that are no views, but those that leave as views.

    Args:
        graph: A backward, of operator calls whose nodes carry their values as ``meta["val"]``.
    """
    output = graph.output_node()
    given = {
        fake.storage_key(node.meta["val"])
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    with graph.inserting_before(output):
        results = [
            _no_view(graph, node) if isinstance(node, Node) and _may_be_view(node, given) else node
            for node in output.args[0]  # type: ignore[union-attr]
        ]
    output.args = (results,)


def _no_view(graph: FxGraph, node: Node) -> Node:
    # Detaching makes no view for autograd, of a view neither.
    detached = graph.call_function(aten.detach.default, (node,))
    detached.meta = {"val": node.meta["val"]}  # and none of its marks
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
    """Whether a view is of more memory than its own: eager's is one too, as the parts of what was stacked."""
    own = fake.concrete_size(value.numel()) * value.element_size()
    return own < fake.storage_bytes(value)
