"""The interface of hooks on a planned graph, the context that makes them, and the callable that calls them.

Only the autograd node of a compiled graph sees the gradients that it gets and returns in a user's backward. A
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
    """All that a hook may know of its graph when the graph is compiled.

    Attributes:
        graph: The captured forward.
        plan: The plan that the graph runs by.
        unused_outputs: Positions of the graph's outputs that the loss does not use.
        autocast: The regions of autocast that the graph was called in.
        calls: The calls of the module that the graph is a part of.
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
        watches: Whether :meth:`instead` and :meth:`on_forward` have anything to do; read once, after the
            graph was traced.
    """

    watches: bool = False

    def on_traced(self, traced: TracedGraph) -> None:
        """Called with the joint graph that AOTAutograd traced, once."""

    def backward(self, compiled: aot.BoxedFunction) -> aot.BoxedFunction:
        """Given the compiled backward, the function to run: the same, or another around it."""
        return compiled

    def instead(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """A function to run in place of the planned graph in this call; None: the planned graph runs."""
        return None

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments to pass to the forward. All other methods get the caller's arguments."""
        return args

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        """Called after each forward.

        Args:
            node: Its autograd node.
            args: The caller's arguments. A hook that holds them holds the memory of the step's inputs.
        """

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        """The results to return, given the forward's; ``node`` is None where there is no autograd node."""
        return results


class CompiledGraph:
    """A compiled graph that calls its hooks at every call.

    Args:
        call: Runs the graph.
        hooks: Called in this order.
    """

    def __init__(self, call: Callable[..., Any], hooks: Sequence[GraphHook]) -> None:
        self._call = call
        # A call is a few microseconds: it only calls methods that are overridden.
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
