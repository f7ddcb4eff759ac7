"""A graph as Dynamo made it: its structure, and which of its outputs get gradients."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.joint.graph_modules import graph_module
from planner._torch.tensors import call_tensors, held_tensors


def structure_of(graph: GraphModule) -> str:
    """Digest of a Dynamo graph's operations and their wiring, without shapes and constants.

    Symbolic sizes, and numbers computed from them, are left out: captured with plain numbers or with symbols,
    a graph has the same digest.
    """
    sizes: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        of_sizes = bool(node.all_input_nodes) and sizes.issuperset(node.all_input_nodes)
        if _is_size(value) or (of_sizes and node.op != "output" and not call_tensors(value)):
            sizes.add(node)
    nodes = [n for n in graph.graph.nodes if n not in sizes]
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
    """A copy of a Dynamo graph in which some outputs are cut off from differentiation.

    AOTAutograd takes several outputs of one storage for views of one result. Their gradients then reach that
    result in another order, among those of its other uses, than in eager. Outputs without a gradient are
    hidden from it, so that they do not count.
    """
    apart = _without_gradient_beside_others(graph, outputs)
    if not outputs and not apart:
        return graph
    result = copied(graph)
    node = result.graph.output_node()
    results = list(node.args[0])  # type: ignore[arg-type]
    with result.graph.inserting_before(node):
        for index in outputs:
            results[index] = result.graph.call_method("detach", (results[index],))
        for index in apart:  # AOTAutograd does not see that `_unsafe_view` returns the same memory
            shape = result.graph.call_method("size", (results[index],))
            unsafe = torch.ops.aten._unsafe_view.default
            results[index] = result.graph.call_function(unsafe, (results[index], shape))
    node.args = (tuple(results),)
    result.recompile()
    return result


def _without_gradient_beside_others(graph: GraphModule, detached: Sequence[int]) -> list[int]:
    """Outputs that get no gradient and share the memory of a result with others that may get one."""
    outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    given = graph.graph.find_nodes(op="placeholder") + graph.graph.find_nodes(op="get_attr")
    inputs = {fake.storage_key(t) for t in map(_with_memory, given) if t is not None}
    results = {}
    for i, tensor in enumerate(map(_with_memory, outputs)):
        if tensor is not None and (storage := fake.storage_key(tensor)) not in inputs:
            results[i] = (storage, tensor.requires_grad and i not in detached)
    differentiated = {storage for storage, requires_grad in results.values() if requires_grad}
    return [i for i, (storage, requires) in results.items() if not requires and storage in differentiated]


def views_handed_on(graph: GraphModule, received: Iterable[int]) -> dict[int, list[torch.fx.Node]]:
    """The outputs of a Dynamo graph that get gradients and are views of inputs.

    Args:
        graph: The graph.
        received: Positions of the outputs that get gradients.

    Returns:
        These outputs, by the position of the input.
    """
    places = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if (tensor := _with_memory(node)) is not None:
            places[fake.storage_key(tensor)] = i
    outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    views: dict[int, list[torch.fx.Node]] = {}
    for node in (outputs[i] for i in sorted(received)):
        tensor = None if node.op == "placeholder" else _with_memory(node)
        if tensor is not None and (storage := fake.storage_key(tensor)) in places:
            views.setdefault(places[storage], []).append(node)
    return views


def _with_memory(node: Any) -> torch.Tensor | None:
    """The tensor of a node, if it has memory of its own and is neither sparse nor made of others."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value if all(held is value for held in held_tensors(value)) else None


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
