"""Rows of the problem in the making, and where they come from."""

from dataclasses import dataclass, replace
from typing import Any

from planner.graph.joint_graph import JointOp
from planner.training_step.call import Call
from solvers.model.graph import Op, Value
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


@dataclass(frozen=True)
class Facts:
    """What is alike in all executions of an operation of a graph."""

    recomputable: bool
    name: str
    value_name: str

    @classmethod
    def of(cls, op: JointOp) -> "Facts":
        return cls(op.recomputable, f"{op.name} #{op.index}", f"{op.node.name} @ {op.module}")


def timed(op: Op, seconds: float, workspace_bytes: int) -> Op:
    """An operation with its costs. There are tens of thousands; ``replace`` looks at all fields of each."""
    return Op(
        op.inputs,
        op.outputs,
        seconds,
        workspace_bytes,
        op.phase,
        op.recomputable,
        op.region,
        op.replay,
        op.name,
        op.module,
        op.writes,
        op.blocks,
    )


def of_size(value: Value, size: int) -> Value:
    return value if value.bytes == size else replace(value, bytes=size)
