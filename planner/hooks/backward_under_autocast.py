"""A warning where the backward is called inside a region of autocast, which PyTorch advises against.

In eager autocast then casts the arguments of the backward's operators: a product of gradients in single
precision is computed in half precision. A planned backward runs outside autocast, as AOTAutograd traces it.
"""

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from planner._torch.autocast_state import autocast_regions, casts
from planner._torch.execution.cast_inside import has_rule
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.trace import TracedGraph
from planner.planfile.schema import BY_OPERATORS


class BackwardUnderAutocast(GraphHook):
    """Warns once where a planned backward would have been cast without a plan.

    Args:
        warn: Called with the warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._calls: dict[Any, tuple[Any, Any, Any]] = {}  # one of each operator and types of its arguments
        self._casts: dict[tuple[str, ...], bool] = {}  # by regions, whether these cast anything
        self._warned = False

    def on_traced(self, traced: TracedGraph) -> None:
        for op in traced.reading.ops[traced.reading.forward_length :]:
            if has_rule(op.node.target):
                types = tuple(_type(node) for node in op.node.all_input_nodes)
                arguments = map_arg((op.node.args, op.node.kwargs), lambda node: node.meta["val"])
                self._calls[op.node.target, types] = (op.node.target, *arguments)
        self.watches = bool(self._calls)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        node.register_prehook(lambda _: self._look())

    def _look(self) -> None:
        regions = tuple(autocast_regions())
        if not regions or self._warned:
            return
        if regions not in self._casts:
            self._casts[regions] = any(casts(*call) for call in self._calls.values())
        if self._casts[regions]:
            self._warned = True
            self._warn(
                "the backward of a planned module is called inside a region of autocast: without a plan some "
                "of its operations would be cast there, and gradients differ from those. Leave the region "
                "before loss.backward(), as PyTorch advises"
            )


def _type(node: Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def hook(context: HookContext) -> GraphHook:
    """A hook for every graph but Inductor's: a compiled backward is not cast without a plan either."""
    return BackwardUnderAutocast(context.warn) if context.plan.target.backend in BY_OPERATORS else GraphHook()
