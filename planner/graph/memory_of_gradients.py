"""No two gradients of a graph lie in one memory.

A leaf takes a gradient that nobody else holds as its ``grad``, into which clipping and optimizers write.
Where one result is the gradient of several inputs, eager copies it for all but one. The engine sees that by
the references to a tensor, not to its memory: so one result is returned as one tensor, however often, and of
different results in one memory all but one are copied.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from planner._torch import fake
from planner._torch.operators import returns_no_views
from planner.graph.sent import is_whole

aten = torch.ops.aten


def keep_gradients_apart(graph: Graph, forward_outputs: int = 0) -> None:
    """Copy the gradients that lie in the memory of others.

    Parts of a memory stay views, as eager's are, and so does what is expanded: no leaf takes that as it is.

    Args:
        graph: A joint graph or a backward, of operator calls whose nodes carry their values as
            ``meta["val"]``.
        forward_outputs: How many of its results, from the first, are no gradients.
    """
    output = graph.output_node()
    results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    gradients = sorted(
        dict.fromkeys(filter(_is_strided, results[forward_outputs:])),
        key=lambda node: returns_no_views(node.target),  # views are copied, rather than what they view
    )
    left = Counter(fake.storage_key(node.meta["val"]) for node in gradients)
    copies: dict[Any, Node] = {}
    with graph.inserting_before(output):
        for node in gradients:
            key = fake.storage_key(node.meta["val"])
            if node.op == "call_function" and is_whole(node.meta["val"]):
                left[key] -= 1
                if left[key]:
                    copies[node] = _copy(graph, node)
    output.args = (
        [*results[:forward_outputs], *(copies.get(node, node) for node in results[forward_outputs:])],
    )


def _is_strided(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _copy(graph: Graph, node: Node) -> Node:
    copied = graph.call_function(aten.clone.default, (node,))
    copied.meta = {"val": fake.same_shape(node.meta["val"]), "partitioner_tag": "is_backward"}
    return copied
