"""What the layers of a module ran, while the graphs of its step were captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner._torch.without_data import fake_values
from planner._torch.without_data.plain import facts_of
from planner.training_step.regions import Forward


@dataclass(frozen=True)
class RanGraph:
    """An execution of a graph: equal to another of the same graph, of like arguments.

    Attributes:
        graph: The index of the graph.
        arguments: What these were.
        results: How many tensors it returned.
        ended_early: Whether the graph ended where something could not be captured.
    """

    graph: int
    arguments: tuple[object, ...]
    results: int
    ended_early: bool

    def is_all_of(self, made: int) -> bool:
        """Whether a layer that made so many tensors may have run this alone."""
        return self.results == made and not self.ended_early


Ran = dict[torch.nn.Module, list[list[RanGraph]]]
"""By layer: the graphs that each of its calls ran."""


class GraphsOfLayers:
    """Notes which graphs run, and in which layers.

    Attributes:
        ran: What ran in each layer.
    """

    def __init__(self) -> None:
        self.ran: Ran = {}
        self._all: list[RanGraph] = []

    def note(self, graph: int, arguments: Sequence[object], results: Sequence[object], ended: object) -> None:
        """Note an execution, of a graph that ended for a reason, or for none."""
        returned = sum(isinstance(result, torch.Tensor) for result in results)
        self._all.append(RanGraph(graph, tuple(map(_kind, arguments)), returned, ended is not None))

    def of(self, forward: Forward) -> Forward:
        """What runs the forward of a layer, noted."""

        def run(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = len(self._all)
            result = forward(module, args, kwargs)
            self.ran.setdefault(module, []).append(self._all[before:])
            return result

        return run


def _kind(argument: object) -> object:
    if not isinstance(argument, torch.Tensor):
        return type(argument), argument
    return facts_of(argument) or fake_values.known_numbers(argument) or ("itself", id(argument))
