"""Floats that a forward returns and that are computed from sizes alone, as ``float(len(batch))``.

At plain sizes Dynamo knows them, and they are not in its graph. At symbolic sizes its graph returns each as a
tensor made of the number, which is read again. Computed apart, they leave a graph that is the planned one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner.graph.dynamo_graph import copied


@dataclass(frozen=True)
class NumbersApart:
    """A Dynamo graph without the numbers that it returns.

    Attributes:
        rest: The graph without them; it has the same inputs.
        numbers: Computes them from the inputs.
        positions: Where they are among the outputs.
    """

    rest: GraphModule
    numbers: GraphModule
    positions: Sequence[int]

    def together(self, rest: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns all outputs in order, given a function that runs :attr:`rest`."""

        def run(*args: Any) -> list[Any]:
            results = list(rest(*args))
            for position, number in zip(self.positions, self.numbers(*args), strict=True):
                results.insert(position, number)
            return results

        return run


def numbers_apart(graph: GraphModule) -> NumbersApart | None:
    """Take the numbers out of a Dynamo graph of symbolic sizes; None where it returns none."""
    outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    positions = [i for i, output in enumerate(outputs) if _is_number(output)]
    if not positions:
        return None
    others = [i for i in range(len(outputs)) if i not in positions]
    return NumbersApart(_returning(graph, others), _returning(graph, positions), positions)


def _is_number(output: Any) -> bool:
    if not isinstance(output, Node) or output.target is not torch.scalar_tensor:
        return False
    made_of = output.args[0]
    return isinstance(made_of, Node) and fake.is_size(made_of.meta.get("example_value"))


def _returning(graph: GraphModule, positions: Sequence[int]) -> GraphModule:
    """A copy that returns some of the outputs, and computes what they need."""
    result = copied(graph)
    node = result.graph.output_node()
    outputs: Sequence[Any] = node.args[0]  # type: ignore[assignment]
    unwanted = [o for i, o in enumerate(outputs) if i not in positions and _is_number(o)]
    numbers_only = all(_is_number(outputs[i]) for i in positions)
    node.args = (tuple(outputs[i] for i in positions),)
    if numbers_only:
        result.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    else:  # nothing else is left out: an operation without a user may draw random numbers
        for number in dict.fromkeys(unwanted):
            result.graph.erase_node(number)
    result.recompile()
    return result
