"""Calls of ``torch.utils.checkpoint`` in a graph that Dynamo made.

Dynamo makes of such a call an operator, with the part as a graph of its own, for AOTAutograd to trace.
Run as it is, it draws other random numbers when the backward runs the part again, and raises where autocast
casts a weight then that it had in its cache before.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from planner._torch.execution.function_calls import calls_functions, refuse_second_derivatives

_CALL = getattr(torch.ops.higher_order, "tag_activation_checkpoint", None)  # which Dynamo defines
_CONTEXT = "_checkpoint_context_fn"


def checkpointed_part(graph: GraphModule, node: Node) -> GraphModule | None:
    """The graph of what a node checkpoints; None where it is no call of ``torch.utils.checkpoint``."""
    if node.target is not _CALL:
        return None
    name: Any = node.args[0]
    return graph.get_submodule(str(name.target))  # type: ignore[return-value]


def is_reentrant(call: Node) -> bool:
    """Whether a checkpoint differentiates its part apart, when the backward runs it again."""
    return call.kwargs.get("use_reentrant") is not False


def checkpoint_calls(graph: GraphModule) -> int:
    """How many calls of ``torch.utils.checkpoint`` a graph that Dynamo made covers."""
    return sum(node.target is _CALL for part in _parts(graph) for node in part.graph.nodes)


def weights_summed_apart(graph: GraphModule) -> int:
    """How many inputs get a gradient from a reentrant checkpoint and several from elsewhere.

    Without a plan the former goes to the parameter at once, and the others are added up by themselves.
    """
    count = 0
    for node in graph.graph.find_nodes(op="placeholder"):
        inside = [u for u in node.users if u.target is _CALL and is_reentrant(u)]
        value = node.meta.get("example_value")
        wanted = isinstance(value, torch.Tensor) and value.requires_grad
        count += bool(inside) and wanted and len(node.users) - len(inside) > 1
    return count


def name_apart(graph: GraphModule) -> None:
    """Let no node inside of a checkpoint have the name of another: what is traced of it is known by that."""
    for name, part in graph.named_modules():
        prefix = f"{name.replace('.', '_')}__"
        if not name or not isinstance(part, GraphModule):
            continue
        for node in part.graph.nodes:
            if not node.name.startswith(prefix):
                node.name = prefix + node.name


def _parts(graph: GraphModule) -> Iterator[GraphModule]:
    return (part for part in graph.modules() if isinstance(part, GraphModule))


def as_written(graph: GraphModule) -> GraphModule:
    """The same graph, in which checkpoints are what a user calls, and autograd functions are differentiated
    once at most; the graph itself where it has none."""
    if not checkpoint_calls(graph) and not calls_functions(graph):
        return graph
    copied = GraphModule(graph, copy.deepcopy(graph.graph))
    copied.meta.update(graph.meta)
    for name, part in graph.named_children():
        if isinstance(part, GraphModule):
            setattr(copied, name, as_written(part))
    for node in copied.graph.nodes:
        if node.target is _CALL:
            node.target = _checkpoint
    refuse_second_derivatives(copied)
    copied.recompile()
    return copied


def _checkpoint(body: GraphModule, *args: Any, **options: Any) -> Any:
    if _CONTEXT in body.meta:
        options["context_fn"] = body.meta[_CONTEXT]
    return checkpoint(body, *args, **{**options, "use_reentrant": False, "preserve_rng_state": True})
