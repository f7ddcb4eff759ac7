"""Rows of the problem in the making, and where they come from."""

from dataclasses import dataclass
from typing import Any

from planner.training_step.call import Call
from solvers.model.graph import Op
from solvers.model.indices import BaseOp, ValueId


@dataclass(frozen=True)
class Source:
    """Where a base row of the problem comes from: operation ``op`` of captured graph ``graph``, -1 for glue;
    ``instance`` counts the executions of one graph within the step."""

    graph: int = -1
    instance: int = 0
    op: int = -1


@dataclass
class Row:
    """A base row in the making; ``again`` is its replay form."""

    source: Source
    op: Op
    call: Call | None
    output: Any
    allocates: tuple[ValueId, ...]
    again: "Again | None" = None


@dataclass
class Again:
    """How a row is run a second time: with what, for what, and what that needs besides. ``call`` is None
    where the same operation runs; ``extra_bytes`` are held while it runs. ``writers`` are the rows that write
    over its result, which run with it.
    """

    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    call: Call | None = None
    extra_bytes: int = 0
    writers: tuple[BaseOp, ...] = ()
