"""Calls that are put into a joint graph, with what a traced one would say of itself."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from planner._torch import fake
from planner.graph.dying_operands import RUNS_ONCE

_TOLD = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "from_node", "custom")
"""Keys in a node's ``meta`` that say where it comes from."""


class Emitter:
    """Emits calls before a node of a graph.

    Args:
        graph: The graph.
        before: The node that the calls come before.
        half: Their ``partitioner_tag``: "is_forward" or "is_backward".
        runs_once: Whether they are never run again.
    """

    def __init__(self, graph: FxGraph, before: Node, half: str, runs_once: bool = False) -> None:
        self._graph, self._before, self._half, self._runs_once = graph, before, half, runs_once

    def place(self, places: Mapping[Node, int]) -> int:
        """The place of the node that the calls come before, of the places in the graph as it was."""
        return places[self._before]

    def call(self, origin: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
        """Emit one call in the place of ``origin``, and compute its result without data."""
        value = called(target, args, kwargs or {}, origin.meta["val"])
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, dict(kwargs or {}))
        node.meta = {key: origin.meta[key] for key in _TOLD if key in origin.meta}
        node.meta["partitioner_tag"] = self._half
        if self._runs_once:
            node.meta[RUNS_ONCE] = True
        node.meta["val"] = value
        return node


def called(target: Any, args: Any, kwargs: Any, like: Any) -> Any:
    """The result of a call, without data. It is computed in the fake mode of the value ``like``."""
    args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    with fake.mode_of(tensors_in([like])):
        return target(*args, **kwargs)


def tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        yield from (
            v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, torch.Tensor)
        )
