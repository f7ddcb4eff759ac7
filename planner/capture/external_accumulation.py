"""Gradients that are accumulated outside of the captured graphs, as a recorded step shows them."""

from collections.abc import Sequence

import torch
from torch.fx import Node

from planner._torch import fake, pytree
from planner._torch.execution.checkpoints import weights_summed_apart
from planner._torch.joint import aot_metadata
from planner.capture.graphs.graph_runner import GraphRunner
from planner.compiled.views_outside import for_one_use
from planner.graph.accumulation import is_sum
from planner.graph.dynamo_graph import views_handed_on
from planner.graph.passes.per_use_gradients import uses_of
from planner.training_step.recorder import Recording

_ADDITIONS = (torch.ops.aten.add, torch.ops.aten.add_)
_MOST_ELEMENTS = 2**24


def sums_between_graphs(recording: Recording, runners: Sequence[GraphRunner]) -> list[tuple[int, int]]:
    """Sums of gradients that a graph has made inside and that the step then adds to another gradient.

    Without a plan the gradients of a tensor's uses are added one by one, that of the last use first.

    Returns:
        For each sum the graph, and the position of the input that it belongs to (-1: unknown).
    """
    sums = {r.index: r.sums() for r in runners if r.joint is not None}
    added_up: dict[int, list[tuple[int, int]]] = {}  # one gradient may be that of several inputs
    between: list[tuple[int, int]] = []
    for event in recording.events:
        call = event.graph
        if call is not None and call.backward:
            for output, position in sums[call.graph].items():
                if call.outputs[output] >= 0:
                    added_up.setdefault(call.outputs[output], []).append((call.graph, position))
        elif call is None and event.backward and event.call is not None:
            name = recording.calls[event.call].func.overloadpacket
            if name in _ADDITIONS and len(event.reads) == 2 and event.reads[0] >= 0:
                between += [place for r in event.reads[1:] for place in added_up.get(r, ())]
    return between


def ask_for_per_use_gradients(recording: Recording, runners: Sequence[GraphRunner]) -> list[GraphRunner]:
    """Ask graphs for per-use gradients where the step adds others before them; returns those graphs."""
    asked: dict[int, set[int]] = {}
    for graph, position in sums_between_graphs(recording, runners):
        asked.setdefault(graph, set()).add(position)
    for graph, positions in asked.items():
        runners[graph].per_use_inputs = frozenset(positions - {-1})
    return [runners[graph] for graph in sorted(asked) if runners[graph].per_use_inputs]


def reordered_views(runners: Sequence[GraphRunner]) -> int:
    """How many tensors get gradients in another order than without a plan.

    These count:

    * Results of which several outputs are views: gradients of the outputs come before those of uses inside
      the graph, whichever use came last in the forward.
    * Inputs that the graph changes in place and returns views of, for the same reason. Views of other inputs
      are taken outside of the graph (:mod:`planner.compiled.views_outside`).
    * Inputs that one operation uses several times: taken outside, it gets one alias for all.
    * Weights of reentrant checkpoints, see :func:`weights_summed_apart`.
    """
    captured = [runner for runner in runners if runner.joint is not None]
    return sum(
        _reordered(runner)
        + _reordered_inputs(runner)
        + _used_several_times(runner)
        + weights_summed_apart(runner.graph)
        for runner in captured
    )


def _used_several_times(runner: GraphRunner) -> int:
    """How many operations use an input several times that is given to them as an alias for one use."""
    counts, unknown = uses_of(runner.graph, runner.example_inputs, for_one_use(runner.graph))
    return len(counts) + len(unknown)


def _reordered_inputs(runner: GraphRunner) -> int:
    assert runner.joint is not None
    inputs = runner.graph.graph.find_nodes(op="placeholder")
    # Of several views that one operation makes each has a gradient of its own inside.
    apart = runner.gradients.received - aot_metadata.gradients_of_outputs(runner.joint.graph).keys()
    handed_on = views_handed_on(runner.graph, apart)
    return sum(_used_beside(inputs[position], views) for position, views in handed_on.items())


def _used_beside(given: Node, views: Sequence[Node]) -> bool:
    """Whether an input has more than two uses, returned views included: a sum of two has one order only."""
    path: set[Node] = set()  # from the input to the views
    for view in views:
        node = view
        while node is not given and node.all_input_nodes and node not in path:
            path.add(node)
            node = node.all_input_nodes[0]
    uses = [user for node in (given, *path) for user in node.users if user not in path]
    return len(views) + sum(map(_differentiable, uses)) > 2


def _differentiable(node: Node) -> bool:
    value = node.meta.get("example_value")
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(value))


def _reordered(runner: GraphRunner) -> int:
    assert runner.joint is not None
    outputs: Sequence[Node] = runner.graph.graph.output_node().args[0]  # type: ignore[assignment]
    traced = aot_metadata.gradients_of_results(runner.joint.graph)
    groups: dict[int, list[int]] = {}
    for i in sorted(runner.gradients.received):
        groups.setdefault(fake.storage_key(outputs[i].meta["example_value"]), []).append(i)
    count = 0
    for group in groups.values():
        gradients = [traced[i] for i in group if i in traced]
        if len(group) > 1 and len(gradients) == 1:
            uses = _sums_after(gradients[0])
            views = [outputs[i].meta["example_value"] for i in group]
            # A sum of two has one order only. Views that do not overlap add zeros to each other's gradient.
            count += len(group) + uses > 2 and (uses > 0 or _overlap(views))
    return count


def _sums_after(gradient: Node) -> int:
    """How many gradients are added to one."""
    total: Node | None = gradient
    count = -1
    while total is not None:
        count += 1
        total = next((n for n in total.users if is_sum(n) and n.args[0] is total), None)
    return count


def _overlap(views: Sequence[torch.Tensor]) -> bool:
    sizes = [fake.storage_bytes(v) // v.element_size() for v in views]
    if any(size > _MOST_ELEMENTS for size in sizes) or len({v.dtype for v in views}) > 1:
        return True
    with fake.without_modes():
        taken = torch.zeros(sizes[0], dtype=torch.bool)
        for view in views:
            mine = taken.as_strided(tuple(view.shape), view.stride(), int(view.storage_offset()))
            if bool(mine.any()):
                return True
            mine.fill_(True)
    return False
