"""From the values that are kept to a schedule: recompute the others just in time.

Elsewhere: rematerialisation of a fixed saved set; "single recompute" when nothing is forgotten.

The backward phase is walked in captured order. An input that is not available is recomputed
right before the operation that needs it, with whatever that needs, in captured order. It
then stays available, so that every forward operation is re-run at most once, unless a ``forget``
callback takes values away again: that is how stretches come to be recomputed several times.

Values that nothing may recompute (of operations that are not recomputable, of glue, of other
regions) are simply available from their first computation on.

Not optimal: an operation whose inputs die early would sometimes better be re-run before its first
use, with its neighbours, than at it. ``polish`` moves those.
"""

from collections.abc import Callable, Iterable

import numpy as np

from solvers.model.arrays import Schedule, ValueMask
from solvers.model.graph import Graph
from solvers.model.indices import RowId, ValueId

Forget = Callable[[list[RowId]], Iterable[ValueId]]
"""Given the rows just re-run for one operation, in order: the values to forget after it."""


def recompute(graph: Graph, kept: ValueMask, *, forget: Forget | None = None) -> Schedule:
    """The schedule that keeps the given values and recomputes the others just in time.

    Args:
        graph: The problem.
        kept: Which values are available when the backward phase starts, bool.
        forget: Called after an operation for which rows were re-run; the values that it returns
            are recomputed once more when they are next needed. Values that are kept or that
            nothing may recompute are never forgotten.

    Returns:
        A schedule, int64. Time is linear in its length (and its uses).
    """
    table = graph.walk_table
    row_of, base_of = table.recompute_row, table.base_of
    recomputable_inputs, outputs = table.recomputable_inputs, table.outputs
    for_good = kept | (graph.recompute_row < 0)
    available = bytearray(for_good.astype(np.uint8).tobytes())
    base_ops = graph.base_ops
    schedule: list[RowId] = []
    done = 0
    for op in table.consumers:
        missing = [v for v in recomputable_inputs[op] if not available[v]]
        if not missing:
            continue
        rerun: set[RowId] = set()
        while missing:
            row = row_of[missing.pop()]
            if row not in rerun:
                rerun.add(row)
                missing += [v for v in recomputable_inputs[row] if not available[v]]
        stretch = sorted(rerun, key=base_of.__getitem__)
        schedule += base_ops[done:op]
        schedule += stretch
        done = op
        for row in stretch:
            for v in outputs[row]:
                available[v] = 1
        if forget is not None:
            for v in forget(stretch):
                if not for_good[v]:
                    available[v] = 0
    schedule += base_ops[done:]
    return np.array(schedule, dtype=np.int64)
