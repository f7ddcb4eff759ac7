"""Gradients arrive at weights in eager's order, where somebody sees that order.

``DistributedDataParallel`` fills its buckets in the order in which gradients first arrive. With more than two
ranks, the place of an element in its bucket decides how its sum is rounded. Hooks on weights see the order
too: a hook that adds noise draws its numbers in it. A graph is a single autograd node, and its gradients
arrive in whatever order the engine's queue gives nodes of the same priority.

So the graph gets each such weight as a view of itself. The engine runs the nodes of views in the reverse
order of their making, and each node hands its gradient on at once.
"""

from collections.abc import Sequence
from typing import Any

import torch

from planner._torch import distributed, tensors
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.trace import TracedGraph


class ArrivalOrder(GraphHook):
    """Hands on the gradients of one planned graph in eager's order."""

    def __init__(self) -> None:
        # Positions of the inputs whose gradients arrive, the last one first: the order of making views.
        self._last_first: Sequence[int] = ()

    def on_traced(self, traced: TracedGraph) -> None:
        mutated = traced.reading.mutated
        self._last_first = [
            position
            for position in reversed(traced.arrivals)
            if position < traced.inputs and position not in traced.per_use_inputs and position not in mutated
        ]

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return args
        ranks = distributed.active_data_parallel_group() is not None
        passed = list(args)
        for position in self._last_first:
            given = args[position]
            if given.is_leaf and given.requires_grad and (ranks or tensors.has_hooks_on_arrival(given)):
                passed[position] = torch.ops.aten.alias(given)
        return tuple(passed)


def hook(_context: HookContext) -> ArrivalOrder:
    """A hook for every graph. Outside ``DistributedDataParallel`` only weights with hooks become views."""
    return ArrivalOrder()
