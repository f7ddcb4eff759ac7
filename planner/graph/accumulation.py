"""Where autograd adds up two gradients, and in which order gradients arrive."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch.execution.op_bindings import same_sizes
from planner._torch.joint import aot_metadata

aten = torch.ops.aten


def is_sum(node: Any) -> bool:
    """Whether a node of a joint graph adds up two gradients, as the autograd engine does."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    values = [n.meta["val"] for n in (node, *node.args) if isinstance(n, Node)]
    return len(values) == 3 and all(v.dtype is values[0].dtype and same_sizes(v, values[0]) for v in values)


def arrivals(joint: GraphModule) -> list[int]:
    """Positions of the forward's plain inputs that get a gradient, in the order in which gradients arrive.

    AOTAutograd traces operations in the engine's order. The gradients of one autograd node arrive when all of
    them are computed, in the order of the operation's arguments; a sum arrives with the last gradient that is
    added to it.

    Args:
        joint: A joint graph as it was traced.
    """
    done = {node: i for i, node in enumerate(joint.graph.nodes)}
    results: Any = joint.graph.output_node().args[0]
    places = aot_metadata.gradient_places(joint)
    inputs = {aot_metadata.input_position(node): node for node in aot_metadata.forward_inputs(joint)}
    # The tensors that a tensor subclass holds are inputs each, while its gradient may be one plain tensor.
    gradients = {p: results[i] for p, i in places.items() if results[i] is not None and p in inputs}

    def autograd_node(gradient: Node) -> Any:
        last = max(gradient.all_input_nodes, key=done.__getitem__) if is_sum(gradient) else gradient
        return last.meta.get("seq_nr", last)

    made_by = {position: autograd_node(gradient) for position, gradient in gradients.items()}
    node_done: dict[Any, int] = {}
    for position, gradient in gradients.items():
        node_done.setdefault(made_by[position], done[gradient])

    def arrives(position: int) -> tuple[int, int, int]:
        given = inputs[position]
        readers = (user for user in given.users if user.meta.get("seq_nr") == made_by[position])
        argument = next((user.all_input_nodes.index(given) for user in readers), len(done))
        return node_done[made_by[position]], argument, done[gradients[position]]

    return sorted(gradients, key=arrives)
