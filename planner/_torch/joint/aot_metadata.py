"""AOTAutograd's metadata of joint graphs: their inputs, outputs, gradients and tangents."""

from typing import Any

import torch

from planner._torch.compat import of_graphs

(
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
) = of_graphs(
    "torch._functorch._aot_autograd.descriptors",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "IntermediateBaseAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
)


def mutated_inputs(joint: torch.fx.GraphModule) -> frozenset[int]:
    """Which inputs of a joint graph the step overwrites (running statistics), by position.

    The graph itself is functional; AOTAutograd copies new values into these inputs after the forward.
    """
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    written = {
        d.mutated_input
        for d in joint.graph.output_node().meta["desc"]
        if isinstance(d, InputMutationAOTOutput)
    }
    return frozenset(i for i, n in enumerate(inputs) if n.meta.get("desc") in written)


def input_position(placeholder: torch.fx.Node) -> int | None:
    """The position, among the forward's inputs, of an input of the joint graph; None for other inputs."""
    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def forward_inputs(joint: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The inputs of a joint graph that are inputs of the forward."""
    nodes = joint.graph.find_nodes(op="placeholder")
    return [n for n in nodes if not isinstance(n.meta.get("desc"), TangentAOTInput)]


def backward_calls(joint: torch.fx.Graph) -> set[torch.fx.Node]:
    """The calls of a joint graph that are its backward: from the first that is marked or reads a gradient on.

    Calls in a backward of the user's own (``torch.autograd.Function``) are not marked.
    """
    found: set[torch.fx.Node] = set()
    for node in joint.nodes:
        if node.op == "call_function" and (found or _begins_backward(node)):
            found.add(node)
    return found


def _begins_backward(call: torch.fx.Node) -> bool:
    return call.meta.get("partitioner_tag") == "is_backward" or any(
        isinstance(n.meta.get("desc"), TangentAOTInput) for n in call.all_input_nodes
    )


def places_among_tensors(joint: torch.fx.GraphModule) -> dict[int, int]:
    """By position of the forward's inputs, the position of the gradient among those that hooks of a compiled
    graph's autograd node get: these are gradients of tensors only, without symbolic sizes."""
    inputs = [n for n in forward_inputs(joint) if isinstance(n.meta.get("val"), torch.Tensor)]
    found = [input_position(n) for n in inputs]
    return {position: place for place, position in enumerate(found) if position is not None}


def gradient_places(joint: torch.fx.GraphModule) -> dict[int, int]:
    """Positions of the outputs of a joint graph that are gradients, by position of the forward's inputs."""
    found = {}
    for place, description in enumerate(joint.graph.output_node().meta["desc"]):
        if isinstance(description, GradAOTOutput) and isinstance(description.grad_of, PlainAOTInput):
            found[description.grad_of.idx] = place
    return found


def gradients_of_outputs(joint: torch.fx.Graph) -> dict[int, torch.Tensor]:
    """The gradients that a joint graph was traced with, by position of their outputs.

    Outputs that are views of another result or of an input are made outside of the graph, and have none.
    """
    return {s.idx: n.meta["val"] for n, s in _gradients(joint) if isinstance(s, PlainAOTOutput)}


def gradients_of_results(joint: torch.fx.Graph) -> dict[int, torch.fx.Node]:
    """The gradients of a joint graph, by position of one of their outputs.

    Where several outputs are views of one result of the graph, its gradient is theirs.
    """
    found = {}
    for node, source in _gradients(joint):
        output = source.base_of if isinstance(source, IntermediateBaseAOTOutput) else source
        if isinstance(output, PlainAOTOutput):
            found[output.idx] = node
    return found


def gradients_of_inputs(joint: torch.fx.Graph) -> tuple[list[torch.fx.Node], dict[int, torch.fx.Node]]:
    """All gradients that a joint graph takes, and those of values that are written into the forward's inputs,
    by position of these."""
    pairs = _gradients(joint)
    written = [(n, s.mutated_input) for n, s in pairs if isinstance(s, InputMutationAOTOutput)]
    return [n for n, _ in pairs], {d.idx: n for n, d in written if isinstance(d, PlainAOTInput)}


def _gradients(joint: torch.fx.Graph) -> list[tuple[torch.fx.Node, Any]]:
    descriptions = [(n, n.meta.get("desc")) for n in joint.find_nodes(op="placeholder")]
    return [(n, d.output) for n, d in descriptions if isinstance(d, TangentAOTInput)]


def source_node_name(node: torch.fx.Node) -> str | None:
    """Name of the forward's node that a node of the joint graph was traced from."""
    sources = node.meta.get("from_node")
    return sources[0].name if sources else None


def tangent_positions(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, int]:
    """Which output of a compiled graph's autograd node each gradient among the joint graph's inputs is of.

    Returns:
        Position among the tangents, by position among the forward's outputs.
    """
    outputs = list(joint.graph.output_node().meta["desc"])[:forward_outputs]
    descriptions = [n.meta.get("desc") for n in joint.graph.nodes if n.op == "placeholder"]
    sources = [d.output for d in descriptions if isinstance(d, TangentAOTInput)]
    return {outputs.index(source): i for i, source in enumerate(sources)}


def gradients_of_nodes(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, torch.Tensor]:
    """The gradients that a joint graph was traced with, by position among the forward's outputs."""
    values = [node.meta["val"] for node, _ in _gradients(joint.graph)]
    return {i: values[p] for i, p in tangent_positions(joint, forward_outputs).items()}


def output_positions(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, int]:
    """Which of the forward's results the outputs of a compiled graph's autograd node are."""
    outputs = list(joint.graph.output_node().meta["desc"])[:forward_outputs]
    return {i: d.idx for i, d in enumerate(outputs) if isinstance(d, PlainAOTOutput)}
