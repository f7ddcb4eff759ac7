"""What the layers of a module ran, while the graphs of its step were captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner._torch.tracing.breaks import graph_breaks
from planner._torch.without_data import fake_values
from planner._torch.without_data.plain import facts_of
from planner.module_parts import buffers_of, parameters_of
from planner.training_step.regions import Forward
from planner.training_step.step import tensors_in


@dataclass(frozen=True)
class RanGraph:
    """An execution of a graph: equal to another of the same graph, of like arguments.

    Attributes:
        graph: The index of the graph.
        arguments: What these were.
        results: How many tensors it returned.
        ended_early: Whether the graph ended where something could not be captured.
        of_its_own: Whether its arguments are the layer's own, and what that was given: nothing that ran as
            written before made one.
    """

    graph: int
    arguments: tuple[object, ...]
    results: int
    ended_early: bool
    of_its_own: bool = True

    def is_all_of(self, made: int) -> bool:
        """Whether a layer that made so many tensors may have run this alone."""
        return self.results == made and not self.ended_early and self.of_its_own


ENDED = RanGraph(-1, (), 0, ended_early=True)
"""In a call in which Dynamo ended a graph, or came to what it could not begin one with."""
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
        self._given: list[torch.Tensor] = []  # to the layer that runs, and what it has

    def note(self, graph: int, arguments: Sequence[object], results: Sequence[object], ended: object) -> None:
        """Note an execution, of a graph that ended for a reason, or for none."""
        returned = sum(isinstance(result, torch.Tensor) for result in results)
        given = {id(tensor) for tensor in self._given}
        own = all(id(a) in given for a in arguments if isinstance(a, torch.Tensor))
        self._all.append(RanGraph(graph, tuple(map(_kind, arguments)), returned, ended is not None, own))

    def of(self, forward: Forward) -> Forward:
        """What runs the forward of a layer, noted."""

        def run(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._given = [*tensors_in((args, kwargs)), *parameters_of(module), *buffers_of(module)]
            before, breaks = len(self._all), sum(graph_breaks.counted_breaks().values())
            result = forward(module, args, kwargs)
            ran = self._all[before:]
            if sum(graph_breaks.counted_breaks().values()) > breaks:
                ran.append(ENDED)
            self.ran.setdefault(module, []).append(ran)
            self._given = []
            return result

        return run


def _kind(argument: object) -> object:
    if not isinstance(argument, torch.Tensor):
        return type(argument), argument
    return facts_of(argument) or fake_values.known_numbers(argument) or ("itself", id(argument))
