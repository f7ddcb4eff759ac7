"""Fewer calls for the same tensors: views that change nothing, or that undo each other, are left out.

Traced graphs are full of them: ``detach`` of saved tensors, ``t`` of ``t`` in the backward of every linear
layer, ``expand`` to the same size. Only views are removed, so storages live exactly as long as before.
Strides stay the same, also those of dimensions of one element: BLAS chooses its kernels by them.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from planner._torch.execution import op_bindings
from planner._torch.operators import returns_no_views
from planner.graph.passes.in_place_accumulation import leaves_as_view

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default}
_SAME_IF_SHAPE_IS = {*_RESHAPES, aten.expand.default, aten.slice.Tensor}
_PERMUTATIONS = {aten.t.default, aten.transpose.int, aten.permute.default}
_VIEWS = _ALIASES | _SAME_IF_SHAPE_IS | _PERMUTATIONS


def simplify(graph: FxGraph, fixed_outputs: int | None = None) -> None:
    """Leave out superfluous views of a graph, in place.

    Args:
        graph: A graph of operator calls whose nodes carry their values as ``meta["val"]``.
        fixed_outputs: How many outputs, from the first, must stay tensors of their own; the others are only
            read. None: all must.
    """
    nodes: list[Node] = list(graph.nodes)
    output = nodes[-1]
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    fixed = set(_nodes(results if fixed_outputs is None else results[:fixed_outputs]))
    returned = set(_nodes(results))
    fixed |= {node for node in returned if leaves_as_view(node)}
    for node in nodes:
        if node.op != "call_function":
            continue
        source = _simpler(graph, node)
        if source is None or source is node:
            continue
        if node in fixed:
            continue
        if node in returned:
            if source.op != "call_function" or source in returned:
                continue  # no tensor may be returned twice: whoever gets one may write to it
            returned.add(source)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target in _VIEWS:
            graph.erase_node(node)


def _simpler(graph: FxGraph, node: Node) -> Node | None:
    """A node that can replace a view: its source, or a view that takes fewer calls; None if there is none."""
    rule: Callable[[FxGraph, Node, Node], Node | None] | None = None
    if node.target in _ALIASES:
        rule = _alias
    elif node.target in _PERMUTATIONS:
        rule = _permutation
    elif node.target in _SAME_IF_SHAPE_IS:
        rule = _reshape
    source = node.args[0] if node.args else None
    if rule is None or not isinstance(source, Node):
        return None
    if not all(isinstance(n.meta.get("val"), torch.Tensor) for n in (node, source)):
        return None
    return rule(graph, node, source)


def _alias(_graph: FxGraph, _node: Node, source: Node) -> Node | None:
    return source


def _reshape(graph: FxGraph, node: Node, source: Node) -> Node | None:
    if node.target in _RESHAPES and not _strides_follow(node, source):
        return None
    if node.target is aten.slice.Tensor and len(node.args) > 4:
        return None  # a slice with a step: its strides differ even if its sizes do not
    if op_bindings.same_sizes(source.meta["val"], node.meta["val"]):
        return source
    before = source.args[0] if source.args else None
    if (
        node.target in _RESHAPES
        and source.target in _RESHAPES
        and isinstance(before, Node)
        and len(source.users) == 1
    ):
        node.update_arg(0, before)
        return _simpler(graph, node)
    return None


def _strides_follow(node: Node, source: Node) -> bool:
    """Whether a reshape gives the same strides whether it is done in one step or in several.

    The strides of dimensions of one element depend on the steps, and are not always those found without data.
    """
    if not any(isinstance(size, int) and size == 1 for size in node.meta["val"].shape):
        return True
    while source.target in _RESHAPES and isinstance(source.args[0], Node):
        source = source.args[0]
    value = source.meta.get("val")  # a tensor that is saved for the backward has none
    return isinstance(value, torch.Tensor) and _makes_storage(source) and op_bindings.is_row_by_row(value)


def _makes_storage(node: Node) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return returns_no_views(node.target)


def _permutation(graph: FxGraph, node: Node, source: Node) -> Node | None:
    order = _order(node)
    if order == sorted(order):
        return source
    before = source.args[0] if source.args else None
    if source.target not in _PERMUTATIONS or not isinstance(before, Node):
        return None
    first = _order(source)
    both = [first[i] for i in order]
    if both == sorted(both):
        return before
    if len(source.users) > 1:
        return None
    moved = [i for i, j in enumerate(both) if i != j]
    with graph.inserting_before(node):
        if len(moved) == 2:
            shorter = graph.call_function(aten.transpose.int, (before, *moved))
        else:
            shorter = graph.call_function(aten.permute.default, (before, both))
    shorter.meta = dict(node.meta)
    return shorter


def _order(node: Node) -> list[int]:
    """For each dimension of a permutation, the dimension of its source."""
    rank = node.meta["val"].dim()
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.permute.default:
        return [int(i) % rank for i in node.args[1]]  # type: ignore[union-attr,arg-type]
    if rank:
        first, second = (int(i) % rank for i in node.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    return order


def _nodes(tree: list[Any]) -> list[Node]:
    return [n for n in tree if isinstance(n, Node)]
