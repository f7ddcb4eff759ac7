"""The interface of replay rules: how an operation runs again with the same result and no further effect.

Most operations are called again as they were. Operations that draw numbers, change statistics or need state
of the first run have a rule. The problem, the partition and the remapping ask the rule, and know none by
name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

Take = Callable[[Node], Any]
"""Maps a node of the joint graph to its stand-in in the emitted graph."""


@dataclass(frozen=True)
class ReplayState:
    """State that the first run leaves for the second, in schedules that have a second.

    Attributes:
        name: Its name, for people.
        bytes: Its size.
        held_bytes: Further bytes that the second run holds while it runs.
        on_host: Whether it is in the host's memory, and takes none of a GPU's.
    """

    name: str
    bytes: int
    held_bytes: int = 0
    on_host: bool = False


@dataclass(frozen=True)
class ReplayCall:
    """The call that a second run makes in place of the operation itself.

    Attributes:
        target: The operator.
        args: Its arguments; nodes among them are those of the joint graph.
        results: Its values, without data.
    """

    target: Any
    args: tuple[Any, ...]
    results: Any


class ReplayRule:
    """How an operation runs, and runs again. Methods that are not overridden call it again as it was."""

    def matches(self, node: Node) -> bool:
        """Whether an operation follows this rule."""
        return True

    def repeatable(self, node: Node) -> bool:
        """Whether a second run gives the same values and changes nothing else."""
        return True

    def state(self, node: Node) -> ReplayState | None:
        """The state that the first run must leave for the second."""
        return None

    def save_state(self, graph: FxGraph, node: Node) -> Node:
        """Emit the call that makes that state, right before the first run."""
        raise NotImplementedError

    def call_again(self, node: Node) -> ReplayCall | None:
        """The call of the second run; None for the same as the first."""
        return None

    def reads_again(self, node: Node) -> Sequence[Node]:
        """The nodes that the second run reads."""
        call = self.call_again(node)
        if call is None:
            return node.all_input_nodes
        read: dict[Node, None] = {}
        map_arg(call.args, lambda n: read.setdefault(n))
        return list(read)

    def values_again(self, node: Node) -> Any:
        """The values that the second run makes, without data."""
        call = self.call_again(node)
        return node.meta.get("val") if call is None else call.results

    def emit_first(self, graph: FxGraph, node: Node, take: Take) -> Node:
        """Emit the first run."""
        return graph.node_copy(node, take)

    def emit_again(self, graph: FxGraph, node: Node, take: Take, state: Node | None) -> Node:
        """Emit a second run, which reads the state that the first one left."""
        call = self.call_again(node)
        if call is None:
            return self.emit_first(graph, node, take)
        return graph.call_function(call.target, map_arg(call.args, take))
