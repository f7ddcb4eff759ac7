"""Gradients that never arrive: take the operations that only they lead to out of a joint or backward graph.

An example are parameters that the forward overwrites under ``torch.no_grad()``, as clipped or normalised
weights. AOTAutograd returns the new value as one more result of the forward, with a gradient of its own,
and copies it into the parameter; but a leaf has no history.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from planner._torch import fake
from planner._torch.joint import aot_metadata
from planner._torch.tensors import call_tensors
from planner.graph.joint_pass import TraceContext

aten = torch.ops.aten


def expect_no_gradient_of_leaves(joint: GraphModule, context: TraceContext) -> None:
    """Leave out the gradients of values that are written into leaves that require gradients.

    Values written into other tensors, as into a buffer that is made empty and filled, do pass gradients on.
    """
    gradients, of_inputs = aot_metadata.gradients_of_inputs(joint.graph)
    absent = {
        gradient
        for position, gradient in of_inputs.items()
        if position < len(context.inputs) and _is_leaf(context.inputs[position])
    }
    if absent:
        leave_out(joint.graph, gradients, absent)


def leave_out(graph: Graph, gradients: Sequence[Node], absent: Collection[Node]) -> list[Node]:
    """Take absent gradients out of a graph, in place.

    An output that only absent gradients lead to becomes None. Where they are combined with others they are
    left out of sums, and are zeros elsewhere, as in the engine. Nodes without readers stay in the graph.

    Args:
        graph: A backward, or forward and backward.
        gradients: The inputs that are gradients of the forward's outputs.
        absent: Those of them that never arrive.

    Returns:
        The nodes that read a storage that now also stands for a sum: none may write into it.
    """
    gone, reached = set(absent), set(gradients)
    merged: set[int] = set()  # storages that now also stand for a sum
    for node in list(graph.nodes):
        if node.op != "call_function" or reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        missing = [n for n in node.all_input_nodes if n in gone]
        if not missing:
            continue
        left = [n for n in node.all_input_nodes if n in reached and n not in gone]
        if not left:
            gone.add(node)
        elif _is_sum(node) and len(missing) == len(left) == 1:
            merged |= _storages([node, left[0]])
            node.replace_all_uses_with(left[0])
            graph.erase_node(node)
        else:
            for absentee in missing:
                with graph.inserting_before(node):
                    zeros = _zeros(graph, absentee)
                node.replace_input_with(absentee, zeros)
    output = graph.output_node()
    output.args = (torch.fx.node.map_arg(output.args[0], lambda n: None if n in gone else n),)
    return [node for node in graph.nodes if not merged.isdisjoint(_storages(node.all_input_nodes))]


def read_by_functions(
    graph: Graph, gradients: Sequence[Node], results: Collection[Node]
) -> dict[Node, set[Node]]:
    """What the backwards of users' own functions compute or hand on, with the gradients that lead to it.

    The engine runs such a backward if any of its gradients arrives, and passes zeros for the others. It may
    make anything of these, and may compute something of no gradient, as of auxiliary losses. Where it begins
    and ends in a graph is not known: only that its calls lack AOTAutograd's mark. What it hands on without a
    call, as of a gradient that the forward computed, is a result, or a part of a sum, of no gradient.

    Args:
        graph: A backward, or forward and backward.
        gradients: The inputs that are gradients of the forward's outputs.
        results: The outputs that are gradients of the forward's inputs.
    """
    lead: dict[Node, set[Node]] = {gradient: {gradient} for gradient in gradients}
    found, handed_on = dict[Node, set[Node]](), [*results]
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        lead[node] = set().union(*(lead.get(n, ()) for n in node.all_input_nodes))
        if "partitioner_tag" not in node.meta and node.meta.get("seq_nr") is not None and node.users:
            found[node] = lead[node]
        if lead[node] and _is_sum(node):
            handed_on += node.all_input_nodes
    found.update((node, set()) for node in handed_on if not lead.get(node))
    return found


def _storages(nodes: Sequence[Node]) -> set[int]:
    """The storages that nodes' tensors lie in."""
    return {fake.storage_key(value) for node in nodes for value in call_tensors(node.meta.get("val"))}


def _is_sum(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    shapes = [n.meta["val"].shape for n in (node, *node.args) if isinstance(n, Node)]
    return len(shapes) == 3 and shapes[0] == shapes[1] == shapes[2]


def _zeros(graph: Graph, absentee: Node) -> Node:
    like: Any = absentee.meta["val"]
    if isinstance(like, list | tuple):
        raise AssertionError("a member of a tuple is taken before it is used")
    if all(isinstance(size, int) for size in like.shape):
        options = {"dtype": like.dtype, "device": like.device}
        node = graph.call_function(aten.zeros.default, (list(like.shape),), options)
    else:  # of the present sizes, for which AOTAutograd passes zeros
        contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
        node = graph.call_function(aten.zeros_like.default, (absentee,), contiguous)
    node.meta = {"val": like}
    return node


def _is_leaf(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
