"""Checkpoint every block: what ``torch.utils.checkpoint`` around each layer of a model does.

Elsewhere: "full activation checkpointing", ``gradient_checkpointing_enable``, ``recompute_grad``.

A block is what stands at one index of a module list (``encoder.layer.3``). What enters or leaves a
block is kept, and so is everything outside of blocks; the inside is recomputed, that of the last
block too. Without such module paths blocks lie between articulation points of the forward graph.

Not optimal, and it ignores the budget: the common practice that all others are compared with.
"""

import re

import numpy as np

from solvers.model.arrays import ValueMask
from solvers.model.cut_points import find_cuts, forward_uses, pinned_values
from solvers.model.graph import Graph
from solvers.model.incumbent import Search
from solvers.model.indices import BaseOp, Position, listed, numbered
from solvers.model.solver import solver

NAME = "checkpoint_all"
BLOCK = re.compile(r"^(?:[^.]*[^.\d][^.]*\.)*?\d+(?=\.|$)")


@solver(NAME)
def solve(search: Search) -> None:
    """Recompute the inside of every block."""
    search.try_kept(block_boundaries(search.graph))


def block_boundaries(graph: Graph) -> ValueMask:
    """Which values enter or leave a block, or lie outside of all, bool."""
    blocks = [block_of(op.module) for op in graph.ops[: graph.forward_length]]
    if len({b for b in blocks if b is not None}) < 2:
        uses = forward_uses(graph)
        pinned = pinned_values(graph, uses)
        cuts = find_cuts(graph, uses, pinned)
        pinned |= cuts.kept_at(listed(Position, np.flatnonzero(cuts.articulation)))
        return pinned
    kept = np.ones(len(graph.values), dtype=bool)
    for i, block in numbered(BaseOp, blocks):
        if block is None:
            continue
        for v in graph.ops[i].outputs:
            readers = [c for c in graph.consumers[v] if c < graph.forward_length]
            kept[v] = any(blocks[c] != block for c in readers) or graph.is_held_beyond_forward(v)
    return kept


def block_of(module: str) -> str | None:
    """The block that a module path lies in; None for a path outside of any."""
    found = BLOCK.match(module)
    return found.group() if found else None
