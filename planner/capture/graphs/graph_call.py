"""Executions of captured graphs, as they are recorded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphCall:
    """An execution of a captured graph within a step.

    Attributes:
        graph: Index of the graph.
        instance: The number of this execution among those of the graph in the step, from 0.
        backward: Whether it is the backward half.
        arguments: Recorded storage of every input of that half (of the backward: every tangent), -1 where
            resident.
        outputs: Recorded storage of every output; -1 where an output has none.
        released: Recorded storages among the arguments that nobody else holds: the graph frees each at its
            last use.
        allocating: How many of the operations recorded right before this event belong to it and allocate; 0
            where a joint graph lists its operations.
        token: Of a forward, a recorded storage without bytes that lives as long as the tensors that it saves
            for its backward; -1 where it saves none.
    """

    graph: int
    instance: int
    backward: bool
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    released: frozenset[int] = frozenset()
    allocating: int = 0
    token: int = -1
