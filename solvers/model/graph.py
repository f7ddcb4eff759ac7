"""The problem a solver sees: operations, the storages they produce, and the order they ran in.

A :class:`Graph` is plain data about one training step. It knows nothing of torch or modules:
every solver, the simulator and the tests work on it alone.

The rules of the model:

* A *value* is one storage, not one tensor; views share the value of their base. Parameters,
  buffers and inputs are resident and do not appear.
* ``ops[:base_length]`` are the operations of the step in captured order, forward before backward
  (glue that ran outside captured graphs included). A schedule contains each of them exactly once,
  in this order, and inserts recomputations of forward operations between backward ones.
* An operation may be re-run in another form than it first ran: a random operation replays its
  saved generator state, a batch normalisation leaves the running statistics alone. Such a *replay*
  form is an extra row from ``base_length`` on with (some of) the same outputs; ``op.replay`` names it.
* A forward operation can be re-run only inside the backward *region* of its own captured graph:
  only there does generated code run.
* A value lives from the step that computes it to its last use before it is computed again. The
  outside world may hold it longer (``held_until``): module outputs, gradients, tangents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from solvers.model.arrays import (
    BaseOpPerRow,
    BaseOpPerValue,
    BaseOps,
    Integers,
    PerRow,
    PerRowSeconds,
    PerValue,
    RowPerValue,
    Schedule,
    ValueIds,
    ValueMask,
)
from solvers.model.in_flight import InFlight
from solvers.model.indices import BaseOp, Per, Region, RowId, ValueId, indices, listed, numbered

GLUE_REGION = Region(-1)


class Phase(IntEnum):
    """Which half of the training step an operation belongs to."""

    FORWARD = 0
    BACKWARD = 1


class Value(NamedTuple):
    """One storage.

    Attributes:
        bytes: Size, rounded as the device's allocator rounds.
        name: For people.
        held_until: The base operation after which the outside world lets go of the first
            computed instance; ``None`` when only operations hold it.
        on_demand: Allocated only in schedules that use it (a saved random generator state).
        overwritten: Others change the first computed instance before the backward, which therefore has to
            compute it again.
    """

    bytes: int
    name: str = ""
    held_until: BaseOp | None = None
    on_demand: bool = False
    overwritten: bool = False


@dataclass(slots=True)
class Op:
    """One operation; nobody changes one that is in a graph.

    Attributes:
        inputs: The values that it reads.
        outputs: The values that it allocates.
        seconds: Its duration.
        workspace_bytes: What its kernel allocates and frees inside.
        phase: Forward or backward.
        recomputable: May it be run a second time (in its ``replay`` form, if it has one)?
        region: The captured graph it belongs to; ``GLUE_REGION`` for operations outside of any.
        replay: The row that stands for its re-run; ``None`` when that is the operation itself.
        name: For people: the operator and its stable index.
        module: Path of the module that it came from, "" for the root.
        writes: Values of other operations that it writes its results into.
        blocks: Named parts of the program that it is in, outermost first: ``number kind name`` of each.
    """

    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    seconds: float = 0.0
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    region: Region = Region(0)  # noqa: RUF009
    replay: RowId | None = None
    name: str = ""
    module: str = ""
    writes: tuple[ValueId, ...] = ()
    blocks: tuple[str, ...] = ()


class GraphError(ValueError):
    """The graph or schedule breaks a rule of the model; the message says which and where."""


@dataclass(frozen=True)
class Graph:
    """Operations and values of one training step.

    Attributes:
        ops: The operations: ``base_length`` base rows in captured order, then replay rows.
        values: The values that they read and write.
        base_length: How many of ``ops`` are base rows; all of them when not given.
        in_flight: Micro-batches whose forwards run ahead; None where a backward follows each forward.

    Raises:
        GraphError: If a value is used before it is produced, produced twice, or an index is off.
    """

    ops: Per[RowId, Op]
    values: Per[ValueId, Value]
    base_length: int = field(default=-1)
    in_flight: InFlight | None = None

    def __post_init__(self) -> None:
        if self.base_length < 0:
            object.__setattr__(self, "base_length", len(self.ops))
        self._check()

    def _check(self) -> None:
        produced: set[ValueId] = set()
        seen_backward = False
        for i, op in enumerate(self.ops[: self.base_length]):
            for v in op.inputs:
                if v not in produced:
                    raise GraphError(f"op {i} ({op.name}) uses value {v} before it is produced")
            for v in op.outputs:
                if v in produced:
                    raise GraphError(f"op {i} ({op.name}) produces value {v} a second time")
                if not 0 <= v < len(self.values):
                    raise GraphError(f"op {i} ({op.name}) produces value {v} of {len(self.values)}")
                produced.add(v)
            if op.phase is Phase.BACKWARD:
                seen_backward = True
            elif seen_backward:
                raise GraphError(f"forward op {i} ({op.name}) comes after a backward op")
            if op.replay is not None and not self.base_length <= op.replay < len(self.ops):
                raise GraphError(f"op {i} ({op.name}) names replay row {op.replay}, not a replay row")
        for i, op in enumerate(self.ops[self.base_length :], self.base_length):
            if not set(op.inputs) | set(op.outputs) <= produced:
                raise GraphError(f"replay row {i} ({op.name}) has a value that no base op produces")

    @cached_property
    def value_ids(self) -> Sequence[ValueId]:
        """All values."""
        return indices(ValueId, len(self.values))

    @cached_property
    def row_ids(self) -> Sequence[RowId]:
        """All rows: base operations, then replays."""
        return indices(RowId, len(self.ops))

    @cached_property
    def base_ops(self) -> Sequence[BaseOp]:
        """The base operations, in captured order."""
        return indices(BaseOp, self.base_length)

    @cached_property
    def forward_ops(self) -> Sequence[BaseOp]:
        """Those of the forward phase, which come first."""
        return self.base_ops[: self.forward_length]

    @cached_property
    def backward_ops(self) -> Sequence[BaseOp]:
        """Those of the backward phase."""
        return self.base_ops[self.forward_length :]

    @cached_property
    def forward_length(self) -> int:
        """Number of base operations in the forward phase (they come first)."""
        return sum(op.phase is Phase.FORWARD for op in self.ops[: self.base_length])

    @cached_property
    def bytes(self) -> PerValue:
        """Bytes of every value, int64."""
        return np.array([v.bytes for v in self.values], dtype=np.int64)

    @cached_property
    def on_demand(self) -> ValueMask:
        """Which values are allocated only in schedules that use them, bool."""
        return np.array([v.on_demand for v in self.values], dtype=bool)

    @cached_property
    def seconds(self) -> PerRowSeconds:
        """Seconds of every row of ``ops``, float64."""
        return np.array([op.seconds for op in self.ops], dtype=np.float64)

    @cached_property
    def workspace_bytes(self) -> PerRow:
        """Workspace bytes of every row of ``ops``, int64."""
        return np.array([op.workspace_bytes for op in self.ops], dtype=np.int64)

    @cached_property
    def producer(self) -> BaseOpPerValue:
        """The base operation that first computes each value, int64; -1 for a value of no op."""
        producer = [-1] * len(self.values)
        for i, op in enumerate(self.ops[: self.base_length]):
            for v in op.outputs:
                producer[v] = i
        return np.array(producer, dtype=np.int64)

    @cached_property
    def consumers(self) -> Per[ValueId, tuple[BaseOp, ...]]:
        """For each value the base operations that read it, in captured order."""
        consumers: list[list[BaseOp]] = [[] for _ in self.values]
        for i, op in numbered(BaseOp, self.ops[: self.base_length]):
            for v in set(op.inputs):
                consumers[v].append(i)
        return tuple(map(tuple, consumers))

    def rerun(self, op: BaseOp) -> RowId:
        """The row to put in a schedule to run base operation ``op`` a second time."""
        replay = self.ops[op].replay
        return op if replay is None else replay

    @cached_property
    def recompute_row(self) -> RowPerValue:
        """For each value the row that recomputes it, int64; -1 where nothing may."""
        row = [-1] * len(self.values)
        for i, op in numbered(BaseOp, self.ops[: self.forward_length]):
            if op.recomputable and op.region != GLUE_REGION:
                again = self.rerun(i)
                for v in self.ops[again].outputs:
                    row[v] = again
        return np.array(row, dtype=np.int64)

    @cached_property
    def walk_table(self) -> "WalkTable":
        """The rows as Python lists, for walks that are no matter for NumPy."""
        row = listed(RowId, self.recompute_row)
        region = [self.ops[r].region if r >= 0 else None for r in row]
        inputs = [tuple(dict.fromkeys(op.inputs)) for op in self.ops]
        recomputable_inputs = [
            tuple([v for v in values if region[v] == op.region])
            for op, values in zip(self.ops, inputs, strict=True)
        ]
        return WalkTable(
            row,
            region,
            inputs,
            recomputable_inputs,
            [i for i in self.backward_ops if recomputable_inputs[i]],
            [op.outputs for op in self.ops],
            [op.region for op in self.ops],
            listed(BaseOp, self.base_of),
        )

    @cached_property
    def region(self) -> PerRow:
        """Region of every row of ``ops``, int64."""
        return np.array([op.region for op in self.ops], dtype=np.int64)

    @cached_property
    def held_table(self) -> tuple[ValueIds, BaseOps]:
        """The values that the outside world holds and the base operations until which it does."""
        held = [(v, x.held_until) for v, x in enumerate(self.values) if x.held_until is not None]
        table = np.array(held, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def is_held_beyond_forward(self, value: ValueId) -> bool:
        """Whether the outside world holds a value when the backward begins."""
        until = self.values[value].held_until
        return until is not None and until >= self.forward_length

    @cached_property
    def base_of(self) -> BaseOpPerRow:
        """For each row of ``ops`` the base operation that it is a form of, int64."""
        base = np.arange(len(self.ops), dtype=np.int64)
        for i, op in enumerate(self.ops[: self.base_length]):
            if op.replay is not None:
                base[op.replay] = i
        return base

    @cached_property
    def input_table(self) -> tuple[Integers, ValueIds]:
        """Inputs of all rows as (offsets, values): row i reads ``values[offsets[i]:offsets[i+1]]``."""
        return _ragged([op.inputs for op in self.ops])

    @cached_property
    def output_table(self) -> tuple[Integers, ValueIds]:
        """Outputs of all rows, in the form of :attr:`input_table`."""
        return _ragged([op.outputs for op in self.ops])

    @cached_property
    def analyses(self) -> dict[str, Any]:
        """Results that other modules computed of this graph, by name, so that each is computed once."""
        return {}

    @cached_property
    def base_schedule(self) -> Schedule:
        """The schedule that recomputes nothing, int64."""
        return np.arange(self.base_length, dtype=np.int64)

    @cached_property
    def base_seconds(self) -> float:
        """Seconds of the step when nothing is recomputed."""
        return float(self.seconds[: self.base_length].sum())


@dataclass(frozen=True, slots=True)
class WalkTable:
    """A graph as Python lists.

    Attributes:
        recompute_row: For each value the row that recomputes it, -1 where nothing may.
        recompute_region: For each value the region in which that may be done; None where nothing may.
        inputs: Distinct inputs of every row.
        recomputable_inputs: Those of them that may be recomputed in the row's region.
        consumers: The backward base operations that have such inputs, in order.
        outputs: Outputs of every row.
        region: Region of every row.
        base_of: The base operation that each row is a form of.
    """

    recompute_row: Per[ValueId, RowId]
    recompute_region: Per[ValueId, Region | None]
    inputs: Per[RowId, tuple[ValueId, ...]]
    recomputable_inputs: Per[RowId, tuple[ValueId, ...]]
    consumers: Sequence[BaseOp]
    outputs: Per[RowId, tuple[ValueId, ...]]
    region: Per[RowId, Region]
    base_of: Per[RowId, BaseOp]


def _ragged(rows: Sequence[Sequence[ValueId]]) -> tuple[Integers, ValueIds]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    flat = np.fromiter((v for r in rows for v in r), dtype=np.int64, count=int(offsets[-1]))
    return offsets, flat
