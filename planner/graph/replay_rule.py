"""The interface of how an operation is run a second time, with the same result and no further effect.

Most operations are called again as they were. Those that draw numbers, change statistics or need something of
the first run have a rule. The problem, the partition and the remapping ask the rule, and know none by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

Take = Callable[[Node], Any]
"""What stands for a node of the joint graph in the graph that is emitted."""


@dataclass(frozen=True)
class ReplayState:
    """Something that the first run leaves for the second, in schedules that have a second.

    Attributes:
        name: What it is.
        bytes: Its size.
        held_bytes: Bytes that the second run holds besides while it runs.
        on_host: It is in the memory of the host, so that it takes none of a GPU's.
    """

    name: str
    bytes: int
    held_bytes: int = 0
    on_host: bool = False


@dataclass(frozen=True)
class ReplayCall:
    """What a second run calls in the place of the operation itself.

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
        """What the first run must leave for the second."""
        return None

    def save_state(self, graph: FxGraph, node: Node) -> Node:
        """Emit what makes that state, right before the first run."""
        raise NotImplementedError

    def call_again(self, node: Node) -> ReplayCall | None:
        """What the second run calls; None for the same as the first."""
        return None

    def reads_again(self, node: Node) -> Sequence[Node]:
        """What the second run reads."""
        call = self.call_again(node)
        if call is None:
            return node.all_input_nodes
        found: dict[Node, None] = {}
        map_arg(call.args, lambda n: found.setdefault(n))
        return list(found)

    def values_again(self, node: Node) -> Any:
        """What the second run makes, without data."""
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
