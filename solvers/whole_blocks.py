"""Blocks of the forward that are recomputed whole, as ``torch.utils.checkpoint`` does it.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174), as
PyTorch has it: values that cross the border of a block are kept, the others dropped. When the block's
backward first needs one of these, all that it needs are recomputed at once, and each stays until its last
use. :mod:`solvers.manual` recomputes value by value instead, just in time.
"""

import numpy as np

from solvers.model.arrays import BlockPerOp, Schedule, ValueMask
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, Block, Per, RowId, ValueId, listed

OUTSIDE = Block(-1)
"""Stands for the block of an operation outside of all blocks."""


def recompute_blocks(graph: Graph, block: BlockPerOp) -> Schedule:
    """The schedule that recomputes blocks whole.

    Args:
        graph: The problem. Whether an operation may be re-run by a plan does not count.
        block: For each forward operation the block that it is in, int64; ``OUTSIDE`` for none.

    Returns:
        A schedule for :func:`solvers.model.schedule.simulate`, int64.
    """
    of_value = np.full(len(graph.values), OUTSIDE, dtype=np.int64)
    for row in graph.forward_ops:
        of_value[list(graph.ops[row].outputs)] = block[row]
    inner = of_value != OUTSIDE
    for row in graph.forward_ops:  # what another block reads crosses a border, and is kept
        for value in graph.ops[row].inputs:
            if of_value[value] != block[row]:
                inner[value] = False
    inner[graph.held_table[0]] = False
    producer, block_of = listed(BaseOp, graph.producer), listed(Block, of_value)
    schedule: list[RowId] = [*graph.forward_ops]
    done: set[Block] = set()
    needed = _needed_by_backward(graph, block_of, inner)
    for row in graph.backward_ops:
        for value in graph.ops[row].inputs:
            at = block_of[value]
            if inner[value] and at not in done:
                done.add(at)
                schedule += [graph.rerun(i) for i in _ancestors(graph, needed[at], inner, producer)]
        schedule.append(row)
    return np.array(schedule, dtype=np.int64)


def _needed_by_backward(
    graph: Graph, block_of: Per[ValueId, Block], inner: ValueMask
) -> dict[Block, set[ValueId]]:
    """For each block the inner values that backward operations read."""
    needed: dict[Block, set[ValueId]] = {}
    for row in graph.backward_ops:
        for value in graph.ops[row].inputs:
            if inner[value]:
                needed.setdefault(block_of[value], set()).add(value)
    return needed


def _ancestors(
    graph: Graph, values: set[ValueId], inner: ValueMask, producer: Per[ValueId, BaseOp]
) -> list[BaseOp]:
    """The operations to run for some values of a block, from what was kept, in order."""
    rows: set[BaseOp] = set()
    pending = list(values)
    while pending:
        row = producer[pending.pop()]
        if row not in rows:
            rows.add(row)
            pending += [v for v in graph.ops[graph.rerun(row)].inputs if inner[v]]
    return sorted(rows)
