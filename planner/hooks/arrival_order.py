"""Gradients arrive at weights in the order in which they would without a plan, where that is seen.

``DistributedDataParallel`` fills its buckets in the order in which gradients first arrive. Of more than two
ranks a sum is rounded by where in a bucket an element lies. Hooks on weights see the order, too: one that
adds noise draws its numbers in it. A graph is a single autograd node: what it returns arrives in the order
that the engine's queue happens to give nodes of the same priority.

So each weight is passed to the graph as a view of itself. The nodes of these views run in the reverse order
of their making, and each hands its gradient on at once.
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
    """One of every graph; only weights with hooks are passed so outside of ``DistributedDataParallel``."""
    return ArrivalOrder()
