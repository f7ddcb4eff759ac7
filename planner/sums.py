"""Gradients that meet outside of the captured graphs, as a recorded step shows them."""

from collections.abc import Sequence

import torch

from planner.graph_runner import GraphRunner
from planner.tracking import Recording

_ADDITIONS = (torch.ops.aten.add, torch.ops.aten.add_)


def sums_between_graphs(recording: Recording, runners: Sequence[GraphRunner]) -> list[tuple[int, int]]:
    """Gradients that are added to others although a graph has added them up inside already.

    Without a plan the uses of a tensor are added one by one, the last first.

    Returns:
        The graph and the position of the input (-1: unknown) of each.
    """
    sums = {r.index: r.sums() for r in runners if r.joint is not None}
    added_up: dict[int, tuple[int, int]] = {}
    found = []
    for event in recording.events:
        call = event.graph
        if call is not None and call.backward:
            for output, position in sums[call.graph].items():
                if call.outputs[output] >= 0:
                    added_up[call.outputs[output]] = (call.graph, position)
        elif call is None and event.backward and event.call is not None:
            name = recording.calls[event.call].func.overloadpacket
            if name in _ADDITIONS and len(event.reads) == 2 and event.reads[0] >= 0:
                found += [added_up[r] for r in event.reads[1:] if r in added_up]
    return found


def hand_out_by_use(recording: Recording, runners: Sequence[GraphRunner]) -> list[GraphRunner]:
    """Ask graphs for gradients use by use where others are added before them; returns those graphs."""
    asked: dict[int, set[int]] = {}
    for graph, position in sums_between_graphs(recording, runners):
        asked.setdefault(graph, set()).add(position)
    for graph, positions in asked.items():
        runners[graph].by_use = frozenset(positions - {-1})
    return [runners[graph] for graph in sorted(asked) if runners[graph].by_use]
