"""What watches a planned graph while it runs: one interface, and the callable that tells its watchers.

The autograd node of a compiled graph is the only place where one learns which gradients come and go in a
user's backward. A :class:`CompiledGraph` finds that node once a call and hands it to every hook that has
something to look for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from planner._torch.joint import aot
from planner.graph.trace import TracedGraph


class GraphHook:
    """Watches one planned graph. Methods that are not overridden do nothing.

    Attributes:
        watches: Whether :meth:`on_forward` has anything to do; told once, after the graph was traced.
    """

    watches: bool = False

    def on_traced(self, traced: TracedGraph) -> None:
        """Look at what AOTAutograd traced."""

    def backward(self, compiled: aot.BoxedFunction) -> aot.BoxedFunction:
        """The compiled backward, or another function around it."""
        return compiled

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        """A forward has run.

        Args:
            node: Its autograd node.
            args: What it was called with. Who holds these holds the memory of the step's inputs.
        """

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        """What the forward hands out, or others in its place; ``node`` is None without an autograd node."""
        return results


class CompiledGraph:
    """A compiled graph that tells its hooks of every call.

    Args:
        call: Runs the graph.
        hooks: They are told in this order.
    """

    def __init__(self, call: Callable[..., Any], hooks: Sequence[GraphHook]) -> None:
        self._call = call
        self._hooks = [hook for hook in hooks if hook.watches]
        self._replacing = [hook for hook in hooks if type(hook).results is not GraphHook.results]

    def __call__(self, *args: Any) -> Any:
        before = aot.nodes_so_far()
        results = self._call(*args)
        node = aot.compiled_node(results, before)
        if node is not None:
            for hook in self._hooks:
                hook.on_forward(node, args)
        for hook in self._replacing:
            results = hook.results(node, args, results)
        return results
