"""A graph as Dynamo made it: its structure, and which of its outputs get gradients."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.joint.graph_modules import graph_module


def structure_of(graph: GraphModule) -> str:
    """Digest of a Dynamo graph's operations and their wiring, without shapes and constants.

    Symbolic sizes are left out, so that it does not matter whether the graph was captured with some.
    """
    nodes = [n for n in graph.graph.nodes if not _is_size(n.meta.get("example_value"))]
    numbers = {n: i for i, n in enumerate(nodes)}
    digest = hashlib.sha256()
    for node in nodes:
        target = node.target if node.op != "placeholder" else ""
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        wiring = ",".join(str(numbers[n]) for n in node.all_input_nodes if n in numbers)
        digest.update(f"{node.op} {name} {wiring}\n".encode())
    return digest.hexdigest()


def _is_size(value: Any) -> bool:
    return fake.is_size(value) or (isinstance(value, torch.Size) and any(map(fake.is_size, value)))


def detach_outputs(graph: GraphModule, outputs: Sequence[int]) -> GraphModule:
    """A copy of a Dynamo graph in which some outputs are cut off from differentiation."""
    if not outputs:
        return graph
    result = copied(graph)
    node = result.graph.output_node()
    results = list(node.args[0])  # type: ignore[arg-type]
    for index in outputs:
        with result.graph.inserting_before(node):
            results[index] = result.graph.call_method("detach", (results[index],))
    node.args = (tuple(results),)
    result.recompile()
    return result


def is_tensor_output(graph: GraphModule, index: int) -> bool:
    """Whether a Dynamo graph has an output of that index, and it is a tensor."""
    outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    return index < len(outputs) and isinstance(
        outputs[index].meta.get("example_value") if isinstance(outputs[index], torch.fx.Node) else None,
        torch.Tensor,
    )


def copied(graph: GraphModule) -> GraphModule:
    """A copy of a graph that can be changed."""
    new = torch.fx.Graph()
    new.output(new.graph_copy(graph.graph, {}))
    result = graph_module(graph, new)
    for old, copy in zip(graph.graph.nodes, result.graph.nodes, strict=True):
        copy.meta = dict(old.meta)
    return result
