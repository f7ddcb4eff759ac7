"""A planned backward runs with the default type of its forward, by which it makes tensors again.

``torch.set_default_dtype`` around a forward, or inside it, is over when the backward runs. What makes tensors
without naming their type, or divides integers, would make others there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from planner._torch.joint import aot
from planner._torch.joint.default_dtype import default_dtype
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.trace import TracedGraph


class DefaultDtype(GraphHook):
    """Runs the backward of one planned graph with the default type that it was traced with.

    Dynamo captures a forward again where that is another.
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
    """One for each graph that makes anything again; what Inductor compiles has types of its own."""
    again = context.plan.recomputed_operations and context.plan.target.backend == "eager"
    return DefaultDtype() if again else GraphHook()
