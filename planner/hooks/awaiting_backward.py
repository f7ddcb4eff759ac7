"""Calls whose backward has not run yet: no prediction counts what two of them hold at once."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from planner._torch import autograd
from planner.hooks.protocol import GraphHook


class Calls:
    """The calls of one planned module.

    Args:
        warn: Called, once each, when a call begins while another awaits its backward, and when a backward
            keeps what it could have freed.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned_of_two = self._warned_of_kept = False
        self.last = _Call()

    def begin(self) -> None:
        """A call of the module begins."""
        if not self._warned_of_two and self.last.awaits_backward():
            self._warned_of_two = True
            self._warn(
                "a forward of the planned module began while an earlier one awaits its backward: both hold "
                "their memory, and the step may take more than predicted. Plan one module that makes both "
                "calls, make them one batch, or let go of outputs that are not differentiated"
            )
        self.last = _Call()

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


class Awaiting(GraphHook):
    """Notes when the backward of one of a module's graphs runs.

    Args:
        calls: Where it is noted.
    """

    watches = True

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        """A forward has run; its node holds the memory of what it saved."""
        call, token = self._calls.last, _Token()
        call.tokens.append(weakref.ref(token))
        # The node holds the hook, and that the token.
        node.register_prehook(lambda _gradients, _token=token: self._before(call))

    def _before(self, call: "_Call") -> None:
        if not autograd.graph_is_kept():
            call.done = True
        elif not torch.is_grad_enabled():  # double_backward.py warns of create_graph=True
            self._calls.kept()


class _Token:
    """Lives as long as an autograd node."""

    __slots__ = ("__weakref__",)


class _Call:
    """One call: tokens of the nodes of its graphs, whether any of their backwards ran, and how often each
    graph ran."""

    __slots__ = ("done", "executions", "tokens")

    def __init__(self) -> None:
        self.done = False
        self.executions: dict[object, int] = {}
        self.tokens: list[weakref.ref[_Token]] = []

    def awaits_backward(self) -> bool:
        return not self.done and any(token() is not None for token in self.tokens)
