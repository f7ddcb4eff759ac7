"""Blocks of the forward that are recomputed whole, as ``torch.utils.checkpoint`` does it.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174), as
PyTorch has it: what crosses the border of a block is kept, the rest is dropped; when its backward first
needs something of that, all that its backward needs is recomputed at once, and each result stays until its
last use. :mod:`solvers.manual` recomputes value by value instead, just in time.
"""

import numpy as np

from solvers.model.arrays import PerRow, Schedule
from solvers.model.graph import Graph

OUTSIDE = -1
"""The block of an operation that is in none."""


def recompute_blocks(graph: Graph, block: PerRow) -> Schedule:
    """The schedule that recomputes blocks whole.

    Args:
        graph: The problem. Whether an operation may be re-run by a plan does not count.
        block: For each forward operation the block that it is in, int64; ``OUTSIDE`` for none.

    Returns:
        A schedule for :func:`solvers.model.schedule.simulate`, int64.
    """
    forward, base = graph.forward_length, graph.base_length
    of_value = np.full(len(graph.values), OUTSIDE, dtype=np.int64)
    for row in range(forward):
        of_value[list(graph.ops[row].outputs)] = block[row]
    inner = of_value != OUTSIDE
    for row in range(forward):  # what another block reads crosses a border, and is kept
        for value in graph.ops[row].inputs:
            if of_value[value] != block[row]:
                inner[value] = False
    inner[graph.held_table[0]] = False
    producer = graph.producer
    steps: list[int] = list(range(forward))
    done: set[int] = set()
    needed = _needed_by_backward(graph, of_value, inner)
    for row in range(forward, base):
        for value in graph.ops[row].inputs:
            at = int(of_value[value])
            if inner[value] and at not in done:
                done.add(at)
                steps += [graph.rerun(i) for i in _ancestors(graph, needed[at], inner, producer)]
        steps.append(row)
    return np.array(steps, dtype=np.int64)


def _needed_by_backward(graph: Graph, of_value: np.ndarray, inner: np.ndarray) -> dict[int, set[int]]:
    """For each block the inner values that backward operations read."""
    needed: dict[int, set[int]] = {}
    for row in range(graph.forward_length, graph.base_length):
        for value in graph.ops[row].inputs:
            if inner[value]:
                needed.setdefault(int(of_value[value]), set()).add(value)
    return needed


def _ancestors(graph: Graph, values: set[int], inner: np.ndarray, producer: np.ndarray) -> list[int]:
    """The operations to run for some values of a block, from what was kept, in order."""
    rows: set[int] = set()
    pending = list(values)
    while pending:
        row = int(producer[pending.pop()])
        if row not in rows:
            rows.add(row)
            pending += [v for v in graph.ops[graph.rerun(row)].inputs if inner[v]]
    return sorted(rows)
