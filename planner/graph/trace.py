"""Per-use (unsummed) gradients of a graph, so that they are added up in eager's order.

Without a plan, the autograd engine adds the gradients of a tensor's uses one by one, the last use first:
``(later + use2) + use1``. A compiled graph hands out ``use2 + use1`` in one piece, and if something arrived
from elsewhere before, the sum is rounded in another order. Such an input is passed to the graph once for each
of its uses: what AOTAutograd traces as one sum is then handed out in its parts, in the order in which they
were added, and the engine adds them up as it does without a plan.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch.joint import aot, aot_metadata
from planner._torch.tensors import writes
from planner.graph.accumulation import is_sum

logger = logging.getLogger(__name__)

aten = torch.ops.aten


@dataclass(frozen=True)
class CompiledByUse:
    """A compiled graph.

    Attributes:
        call: What runs it, with the inputs of the graph.
        left: Positions of the inputs whose gradients should be per use (unsummed), and could not be.
        relaid: Positions of the outputs whose gradients should lie in memory as ``layouts`` says, and were
            traced otherwise.
    """

    call: Callable[..., Any]
    left: frozenset[int]
    relaid: frozenset[int]


def compile_by_use(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    by_use: Collection[int],
    *,
    prepare: Callable[[GraphModule], None],
    partition: aot.Partition,
    forward_compiler: Callable[[GraphModule], aot.BoxedFunction],
    backward_compiler: Callable[[GraphModule], aot.BoxedFunction],
    layouts: Mapping[int, Sequence[int]],
) -> CompiledByUse:
    """Like :func:`planner._torch.joint.aot.compile_joint`, but some gradients are per use (unsummed).

    Args:
        graph: The forward.
        example_inputs: Its inputs.
        by_use: Positions of the inputs whose gradients are to be handed out so. Where only one gradient
            meets, or none, there is nothing to do.
        prepare: Called with a joint graph before anything is read off it; changes it in place.
        partition, forward_compiler, backward_compiler, layouts: As for ``compile_joint``.
    """
    wanted = [i for i in sorted(by_use) if differentiable(example_inputs, i)]
    counts, left = _counted(graph, example_inputs, wanted)
    left |= {i for i in by_use if i >= len(example_inputs)}
    relaid = set(layouts)
    sources = [i for i, count in counts.items() for _ in range(count - 1)]
    handed_out: set[int] = set()

    def partition_sums(joint: GraphModule, outputs: int) -> tuple[GraphModule, GraphModule]:
        prepare(joint)
        gradients = aot_metadata.gradients_of_outputs(joint.graph)
        relaid.intersection_update(
            i for i, d in layouts.items() if i not in gradients or not aot.lies(gradients[i], d)
        )
        handed_out.update(_split(joint, counts, len(example_inputs)))
        return partition(joint, outputs)

    compiled = aot.compile_joint(
        _with_inputs(graph, len(sources)) if sources else graph,
        [*example_inputs, *(example_inputs[i].detach().requires_grad_() for i in sources)],
        partition=partition_sums,
        forward_compiler=forward_compiler,
        backward_compiler=backward_compiler,
        layouts=layouts,
    )
    call = (lambda *args: compiled(*args, *[args[i] for i in sources])) if sources else compiled
    return CompiledByUse(call, frozenset(left | (counts.keys() - handed_out)), frozenset(relaid))


def differentiable(inputs: Sequence[Any], position: int) -> bool:
    """Whether there is an input of that position, and it is a tensor that needs a gradient."""
    tensor = inputs[position] if position < len(inputs) else None
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _counted(
    graph: GraphModule, inputs: Sequence[Any], wanted: Sequence[int]
) -> tuple[dict[int, int], set[int]]:
    """How many gradients the engine adds up for each of some inputs, where these are more than one; and
    those of the inputs for which that cannot be told."""
    if not wanted:
        return {}, set()
    try:
        copies, outputs = aot.run_without_data(graph, inputs)
    except Exception as error:  # whatever operators raise on tensors without data
        logger.info("no per-use gradients: %s", error)
        return {}, set(wanted)
    edges = _edges(outputs)
    counts = {
        i: sum(node is not None and getattr(node, "variable", None) is copies[i] for node in edges)
        for i in wanted
    }
    changed = {i for i in wanted if writes(copies[i]) and counts[i] > 1}
    return {i: n for i, n in counts.items() if n > 1 and i not in changed}, changed


def _edges(outputs: Sequence[Any]) -> list[Any]:
    """For every gradient that is handed on in a backward, the autograd node that it is handed to."""
    waiting = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        for node, _ in waiting.pop().next_functions:
            found.append(node)
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return found


def _split(joint: GraphModule, counts: Mapping[int, int], inputs: int) -> set[int]:
    """Hand out the parts of sums, at the gradients of the inputs that were added for them.

    Returns:
        Positions of the inputs for which that was possible.
    """
    output = joint.graph.output_node()
    flat = list(output.args[0])  # type: ignore[arg-type]
    places = aot_metadata.gradient_places(joint)
    added, done = inputs, set()
    for position, count in counts.items():
        at = [places.get(p, -1) for p in (position, *range(added, added + count - 1))]
        added += count - 1
        parts = _parts(flat[at[0]], count) if -1 not in at else []
        if len(parts) == count:
            done.add(position)
            for place, part in zip(at, parts, strict=True):
                flat[place] = part
    output.args = (tuple(flat),)
    joint.recompile()
    return done


def _parts(total: Any, count: int) -> list[Node]:
    """What the engine added up to a total, first to last; fewer than ``count`` where it cannot be told."""
    parts: list[Node] = []
    while len(parts) < count - 1 and is_sum(total):
        total, part = total.args
        parts.append(part)
    return [total, *reversed(parts)] if isinstance(total, Node) else []


def _with_inputs(graph: GraphModule, count: int) -> GraphModule:
    """A copy of a graph that takes some more inputs, of which it uses none."""
    result = copied(graph)
    last = result.graph.find_nodes(op="placeholder")[-1]
    for index in range(count):
        with result.graph.inserting_after(last):
            last = result.graph.placeholder(f"use_{index}")
    result.recompile()
    return result


def copied(graph: GraphModule) -> GraphModule:
    """A copy of a graph that can be changed."""
    new = torch.fx.Graph()
    new.output(new.graph_copy(graph.graph, {}))
    result = GraphModule(graph, new)
    for old, copy in zip(graph.graph.nodes, result.graph.nodes, strict=True):
        copy.meta = dict(old.meta)
    return result
