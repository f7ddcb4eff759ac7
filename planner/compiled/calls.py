"""The calls of one planned module, and which of their backwards have run."""

import weakref
from collections.abc import Callable


class Token:
    """Lives as long as an autograd node."""

    __slots__ = ("__weakref__",)


class Call:
    """One call: tokens of the nodes of its graphs, whether any of their backwards ran, and how often each
    graph ran."""

    __slots__ = ("done", "executions", "tokens")

    def __init__(self) -> None:
        self.done = False
        self.executions: dict[object, int] = {}
        self.tokens: list[weakref.ref[Token]] = []

    def awaits_backward(self) -> bool:
        return not self.done and any(token() is not None for token in self.tokens)


class Calls:
    """The calls of one planned module.

    Args:
        warn: Called, once each, when a call begins while another awaits its backward, and when a backward
            keeps what it could have freed.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned_of_two = self._warned_of_kept = False
        self.last = Call()

    def begin(self) -> None:
        """A call of the module begins."""
        if not self._warned_of_two and self.last.awaits_backward():
            self._warned_of_two = True
            self._warn(
                "a forward of the planned module began while an earlier one awaits its backward: both hold "
                "their memory, and the step may take more than predicted. Plan one module that makes both "
                "calls, make them one batch, or let go of outputs that are not differentiated"
            )
        self.last = Call()

    def next_execution(self, graph: object) -> int:
        """How often a graph has run in the last call; it runs once more now."""
        executions = self.last.executions
        count = executions.get(graph, 0)
        executions[graph] = count + 1
        return count

    def kept(self) -> None:
        """A backward kept what it could have freed."""
        if not self._warned_of_kept:
            self._warned_of_kept = True
            self._warn(
                "a backward with retain_graph=True holds what the plan would free, and the step may take "
                "more than predicted. Add up the losses and call backward once"
            )
