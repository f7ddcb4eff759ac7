"""Executions of captured graphs, as they are recorded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphCall:
    """An execution of a captured graph within a step.

    Attributes:
        graph: Index of the graph.
        instance: Which of the executions of this graph in the step, from 0.
        backward: Its backward half?
        arguments: Recorded storage of every input of that half (for the backward: of every
            tangent), -1 where resident.
        outputs: Recorded storage of every output, -1 for those that are none.
        released: Recorded storages among the arguments that nobody else holds: they are freed at
            their last use inside.
        allocating: How many operations recorded right before it are its own and allocate; none, where its
            joint graph says what it is made of.
        token: Of a forward, a recorded storage without bytes that lives as long as what it saves for its
            backward; -1 where it saves nothing.
    """

    graph: int
    instance: int
    backward: bool
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    released: frozenset[int] = frozenset()
    allocating: int = 0
    token: int = -1
