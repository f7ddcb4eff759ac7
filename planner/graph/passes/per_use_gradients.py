"""Per-use (unsummed) gradients of a graph, so that they are added up in eager's order.

Without a plan, the autograd engine adds the gradients of a tensor's uses one by one, the last use first:
``(later + use2) + use1``. A compiled graph returns ``use2 + use1`` as one sum; if a gradient arrived from
elsewhere before, the total is rounded in another order. Such an input is passed to the graph once for each of
its uses: the terms of the sum that AOTAutograd traces are then returned one by one, in the order in which
they were added, and the engine adds them up as it does without a plan.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch.joint import aot, aot_metadata
from planner._torch.tensors import writes
from planner.graph.accumulation import is_sum
from planner.graph.dynamo_graph import copied
from planner.graph.joint_pass import TraceContext

logger = logging.getLogger(__name__)


def uses_of(
    graph: GraphModule, inputs: Sequence[Any], positions: Collection[int]
) -> tuple[dict[int, int], set[int]]:
    """How many gradients the engine adds up for each input whose gradients are to be returned unsummed.

    Args:
        graph: The forward.
        inputs: Its inputs.
        positions: Which of them. Where only one gradient comes, or none, there is nothing to do.

    Returns:
        The numbers, by position, where they are more than one; and the positions for which that is unknown.
    """
    wanted = [i for i in sorted(positions) if _differentiable(inputs, i)]
    counts, unknown = _counted(graph, inputs, wanted)
    return counts, unknown | {i for i in positions if i >= len(inputs)}


def _differentiable(inputs: Sequence[Any], position: int) -> bool:
    """Whether there is an input of that position, and it is a tensor that needs a gradient."""
    tensor = inputs[position] if position < len(inputs) else None
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _counted(
    graph: GraphModule, inputs: Sequence[Any], wanted: Sequence[int]
) -> tuple[dict[int, int], set[int]]:
    """How many gradients the engine adds up for each of some inputs, where these are more than one; and
    those of the inputs for which that is unknown."""
    if not wanted:
        return {}, set()
    for inside in (False, True):  # a forward that changes inputs in place cannot be given leaves
        try:
            leaves, passed, outputs = aot.run_without_data(graph, inputs, inside=inside)
            break
        except Exception as error:  # operators raise errors of many classes on tensors without data
            logger.info("no per-use gradients: %s", error)
    else:
        return {}, set(wanted)
    edges = _edges(outputs)
    counts = {}
    for i in wanted:
        senders = [one for one, to in edges if to is not None and getattr(to, "variable", None) is leaves[i]]
        if inside:
            senders = [one for one, to in edges if to in senders]
        counts[i] = len(senders)
    changed = {i for i in wanted if writes(passed[i]) and counts[i] > 1}
    return {i: n for i, n in counts.items() if n > 1 and i not in changed}, changed


def _edges(outputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """For every gradient that is passed on in a backward, the autograd nodes that pass it on and get it."""
    waiting = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        sender = waiting.pop()
        for node, _ in sender.next_functions:
            found.append((sender, node))
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return found


def hand_out_unsummed(joint: GraphModule, context: TraceContext) -> None:
    """Return the terms of sums one by one, as the gradients of the inputs that were added for the uses."""
    output = joint.graph.output_node()
    flat = list(output.args[0])  # type: ignore[arg-type]
    places = aot_metadata.gradient_places(joint)
    added = len(context.inputs)
    for position, count in context.uses.items():
        at = [places.get(p, -1) for p in (position, *range(added, added + count - 1))]
        added += count - 1
        parts = _parts(flat[at[0]], count) if -1 not in at else []
        if len(parts) == count:
            context.unsummed.add(position)
            for place, part in zip(at, parts, strict=True):
                flat[place] = part
    output.args = (tuple(flat),)
    joint.recompile()


def _parts(total: Any, count: int) -> list[Node]:
    """The gradients that the engine added up to a total, first to last; fewer than ``count`` if unknown."""
    parts: list[Node] = []
    while len(parts) < count - 1 and is_sum(total):
        total, part = total.args
        parts.append(part)
    return [total, *reversed(parts)] if isinstance(total, Node) else []


def with_inputs(graph: GraphModule, count: int) -> GraphModule:
    """A graph that takes some more inputs, of which it uses none: one for each use but the first."""
    if not count:
        return graph
    result = copied(graph)
    last = result.graph.find_nodes(op="placeholder")[-1]
    for index in range(count):
        with result.graph.inserting_after(last):
            last = result.graph.placeholder(f"use_{index}")
    result.recompile()
    return result
