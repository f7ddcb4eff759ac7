"""A planned backward runs with the default type of its forward.

A ``torch.set_default_dtype`` around or inside a forward is over when the backward runs. There an operator
that makes a tensor without naming its type, or divides integers, would give its re-run another type.
"""

from collections.abc import Sequence
from typing import Any

import torch

from planner._torch.execution.settings import default_dtype
from planner._torch.joint import aot
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.trace import TracedGraph
from planner.planfile.schema import BY_OPERATORS


class DefaultDtype(GraphHook):
    """Runs the backward of one planned graph with the default type that the graph was traced with.

    Dynamo guards the default type: with another one it captures the forward again.
    """

    _traced_with = torch.float32

    def on_traced(self, traced: TracedGraph) -> None:
        self._traced_with = torch.get_default_dtype()

    def backward(self, compiled: aot.BoxedFunction) -> aot.BoxedFunction:
        traced_with = self._traced_with

        def run(args: list[Any]) -> Sequence[Any]:
            if torch.get_default_dtype() is traced_with:
                return compiled(args)
            with default_dtype(traced_with):
                return compiled(args)

        return run


def hook(context: HookContext) -> GraphHook:
    """A hook for every graph that recomputes, but Inductor's: its programs have types of their own."""
    again = context.plan.recomputed_operations and context.plan.target.backend in BY_OPERATORS
    return DefaultDtype() if again else GraphHook()
