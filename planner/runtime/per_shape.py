"""A graph of symbolic sizes, compiled for numbers instead.

Some operators cannot be traced at symbolic sizes, and some are traced into others than at numbers. Such a
graph is compiled for each shape that comes, a few times; shapes beyond that run it as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch.execution.checkpoints import as_written

MOST_SHAPES = 8
"""For how many shapes one graph is compiled."""

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class StaticShapes:
    """The callable of a graph that is compiled once for each shape of its inputs.

    Args:
        graph: The graph, with symbolic sizes among its inputs.
        compile_: Compiles the graph for inputs with data.
        beyond: Called with the shapes of inputs that run the graph as it is, once for each.
    """

    def __init__(self, graph: GraphModule, compile_: Compile, beyond: Callable[[str], None]) -> None:
        self._graph, self._compile, self._beyond = graph, compile_, beyond
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._warned: set[tuple[Any, ...]] = set()

    def __call__(self, *args: Any) -> Any:
        key = tuple(a for a in args if not isinstance(a, torch.Tensor))
        run = self._compiled.get(key)
        if run is None and len(self._compiled) < MOST_SHAPES:
            run = self._compiled[key] = self._compile(self._graph, args)
        if run is not None:
            return run(*args)
        if key not in self._warned:
            self._warned.add(key)
            self._beyond(", ".join(map(str, key)))
        return as_written(self._graph)(*args)
