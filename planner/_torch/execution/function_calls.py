"""Calls of ``torch.autograd.Function`` in a graph that Dynamo made.

Dynamo makes of such a call an operator, with forward and backward as graphs of their own. The backward is
traced without gradients: differentiated again, it is taken for a constant, silently.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

_CALL = torch.ops.higher_order.autograd_function_apply
DIFFERENTIATED_TWICE = (
    "a torch.autograd.Function of the model is differentiated twice, which a captured graph cannot"
)


def calls_functions(graph: GraphModule) -> bool:
    """Whether a graph, or a part of it, calls autograd functions."""
    return any(_calls(part) for part in graph.modules() if isinstance(part, GraphModule))


def refuse_second_derivatives(graph: GraphModule) -> None:
    """Make it an error to differentiate the gradients again that a graph's autograd functions return.

    Args:
        graph: Changed in place, but for the graphs of the functions, which are replaced.
    """
    for call in _calls(graph):
        reference: Any = call.args[1]
        body = graph.get_submodule(str(reference.target))
        assert isinstance(body, GraphModule)
        changed = GraphModule(body, torch.fx.Graph())
        changed.graph.output(changed.graph.graph_copy(body.graph, {}))
        changed.meta.update(body.meta)
        given, output = changed.graph.find_nodes(op="placeholder"), changed.graph.output_node()
        with changed.graph.inserting_after(given[-1]):
            again = changed.graph.call_function(torch.is_grad_enabled)
        with changed.graph.inserting_before(output):
            results = changed.graph.call_function(_once, (again, output.args[0], tuple(given)))
        output.args = (results,)
        changed.recompile()
        setattr(graph, str(reference.target), changed)


def _once(again: bool, results: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
    """The gradients of a backward; where they could be differentiated again, doing so is an error."""
    if not (again and any(isinstance(t, torch.Tensor) and t.requires_grad for t in given)):
        return results
    refusal: Any = torch._C._functions.DelayedError(DIFFERENTIATED_TWICE, 1)
    return tuple(
        refusal(t.detach().requires_grad_()) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in results
    )


def _calls(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target is _CALL]
