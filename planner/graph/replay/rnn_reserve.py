"""oneDNN's recurrent layers run, first and again, so that they keep the reserve that their backward needs.

The kernel makes its reserve only where autograd is on, whatever its ``train`` argument says, and the emitted
graphs run without autograd.
"""

from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from planner.graph.replay_rule import ReplayRule, Take


class RnnReserve(ReplayRule):
    """Recurrent layers of oneDNN."""

    def matches(self, node: Node) -> bool:
        return node.target is torch.ops.aten.mkldnn_rnn_layer.default

    def emit_first(self, graph: FxGraph, node: Node, take: Take) -> Node:
        emitted = graph.node_copy(node, take)
        emitted.args = (node.target, *emitted.args)  # type: ignore[arg-type]
        emitted.target = with_reserve
        return emitted


RULES = (RnnReserve(),)


def with_reserve(operator: Any, *args: Any) -> Any:
    """Run a recurrent layer so that it keeps the reserve that its backward needs."""
    detached = (a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    with torch.enable_grad():
        return operator(*(list(map(torch.Tensor.detach, a)) if isinstance(a, list) else a for a in detached))
