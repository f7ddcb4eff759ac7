"""The interface of hooks on a planned graph, what they are made from, and the callable that calls them.

Only the autograd node of a compiled graph shows which gradients it gets and returns in a user's backward. A
:class:`CompiledGraph` finds that node once a call and passes it to every hook that needs it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from planner._torch.joint import aot
from planner.compiled.calls import Calls
from planner.graph.trace import TracedGraph
from planner.planfile.plan import PlanRecord


@dataclass(frozen=True)
class HookContext:
    """What hooks are made from, when a graph is compiled.

    Attributes:
        graph: The captured forward.
        plan: The plan that it runs by.
        unused_outputs: Positions of its outputs that the loss does not use.
        autocast: The regions of autocast that it was called in.
        calls: Those of the module that it is a part of.
        warn: Shows the user a text, as a ``PlanWarning``.
    """

    graph: GraphModule
    plan: PlanRecord
    unused_outputs: Sequence[int]
    autocast: Sequence[str]
    calls: Calls
    warn: Callable[[str], None]


class GraphHook:
    """A hook on one planned graph. Methods that are not overridden do nothing.

    Attributes:
        watches: Whether :meth:`on_forward` has anything to do; read once, after the graph was traced.
    """

    watches: bool = False

    def on_traced(self, traced: TracedGraph) -> None:
        """Called with what AOTAutograd traced."""

    def backward(self, compiled: aot.BoxedFunction) -> aot.BoxedFunction:
        """The compiled backward, or another function around it."""
        return compiled

    def instead(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """What runs in place of the planned graph; None where nothing needs to."""
        return None

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the forward is called with, or others in its place; the other methods see the first."""
        return args

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        """A forward has run.

        Args:
            node: Its autograd node.
            args: What it was called with. Holding these holds the memory of the step's inputs.
        """

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        """What the forward returns, or others in its place; ``node`` is None without an autograd node."""
        return results


class CompiledGraph:
    """A compiled graph that calls its hooks at every call.

    Args:
        call: Runs the graph.
        hooks: Called in this order.
    """

    def __init__(self, call: Callable[..., Any], hooks: Sequence[GraphHook]) -> None:
        self._call = call
        self._hooks = [hook for hook in hooks if hook.watches]
        self._asking = [hook for hook in self._hooks if type(hook).instead is not GraphHook.instead]
        self._passing = [hook for hook in hooks if type(hook).arguments is not GraphHook.arguments]
        self._replacing = [hook for hook in hooks if type(hook).results is not GraphHook.results]

    def __call__(self, *args: Any) -> Any:
        for hook in self._asking:
            if (other := hook.instead(args)) is not None:
                return other(*args)
        passed = args
        for hook in self._passing:
            passed = hook.arguments(passed)
        before = aot.nodes_so_far()
        results = self._call(*passed)
        node = aot.compiled_node(results, before)
        if node is not None:
            for hook in self._hooks:
                hook.on_forward(node, args)
        for hook in self._replacing:
            results = hook.results(node, args, results)
        return results
