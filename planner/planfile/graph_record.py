"""The record of one captured graph: its operations, and what its backward runs at each of its executions."""

import itertools
from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planner.planfile.schema import (
    MOST_OPS,
    MOST_STEPS,
    Count,
    InconsistentError,
    Index,
    Label,
    Listed,
    Name,
    Record,
    Seconds,
)

_MOST_PROGRAMS = 10_000
_MOST_PIECES = 4096

MASKED_BY_RESULT = "aten.threshold_backward.default"
"""The backward operation of ReLU, of which a plan may keep signs."""


class OpRecord(Record):
    """One operation of a captured graph; its index in the list is its stable id."""

    name: Name = Field(description="as in aten.addmm.default")
    module: Name = Field(
        description="name of the module that ran it, as named_modules() has it; empty: the planned module"
    )
    bytes: Count = Field(description="bytes of the storages that it makes")
    phase: Literal["forward", "backward"]
    seconds: Seconds


class GradientLayout(Record):
    """How an output's gradient lies in memory, where that is not as the output does."""

    output: Index
    dimensions: Listed[Annotated[int, Field(ge=0, lt=64)]] = Field(
        max_length=64, description="its dimensions, those of the largest strides first"
    )
    inside: Listed[Count] = Field(
        default=[],
        max_length=64,
        description="where it is a part of a larger tensor, the sizes of that, by dimension, 0 where they "
        "are its own; empty where it is no part",
    )
    step: Annotated[int, Field(ge=1, le=MOST_OPS)] = Field(
        default=1, description="elements from one to the next along the last of these dimensions"
    )

    @model_validator(mode="after")
    def _is_an_order(self) -> Self:
        if sorted(self.dimensions) != list(range(len(self.dimensions))):
            raise InconsistentError(
                f"{self.dimensions} does not name each of {len(self.dimensions)} dimensions once",
                "dimensions",
            )
        if self.inside and len(self.inside) != len(self.dimensions):
            raise InconsistentError(
                f"{self.inside} does not give a size for each of {len(self.dimensions)} dimensions", "inside"
            )
        return self


class SplitRun(Record):
    """What is computed in pieces: a run of operations on rows."""

    module: Name = Field(description="name of the module whose product it begins with")
    rows: Annotated[int, Field(ge=1, le=2**63 - 1)] = Field(description="how many rows it has in all")


class SplitRecord(Record):
    """How a graph computes in pieces of rows; `ops` are those with the pieces."""

    form: Literal["forward", "backward"] = Field(
        description="where the gradients of pieces of what ends in the loss are computed: right behind each "
        "piece in the forward, or in the backward"
    )
    pieces: Annotated[int, Field(ge=2, le=_MOST_PIECES)] = Field(description="how many pieces, at most")
    what: Literal["loss", "auto"] = Field(
        default="loss", description="whether MLPs are computed in pieces too: 'auto'"
    )
    runs: Listed[SplitRun] = Field(min_length=1, max_length=MOST_OPS)


class Program(Record):
    """What the backward of a graph runs, at some of its executions in a step."""

    backward: Listed[Index] = Field(
        max_length=MOST_STEPS,
        description="ids of operations in the order in which the backward runs them: each backward operation "
        "once, and forward operations wherever they are re-run",
    )
    packed: Listed[Index] = Field(
        default=[],
        max_length=MOST_OPS,
        description="ids of forward operations, and of backwards of ReLU. The forward keeps the masks of the "
        "former as bits, eight to a byte, or with `target.offload` their results on the host; if `backward` "
        "names them, they are unpacked or fetched. Of ReLU's result it keeps the signs, as bits that the "
        "backward of ReLU reads",
    )
    completed: Listed[Index] = Field(
        default=[],
        max_length=MOST_OPS,
        description="for each forward operation in `packed`, in order: the operation by whose end its "
        "result is on the host; itself: right after the last write to it; empty if nothing is on the host",
    )
    kept: Listed[Index] = Field(
        default=[],
        max_length=MOST_OPS,
        description="ids of forward operations whose results the forward holds for the backward; for "
        "readers: it follows from `backward`",
    )
    emitted: Listed[Label] = Field(
        default=[],
        max_length=2,
        description="for a plan that Inductor runs: identifies the programs that it emits, that of the "
        "forward and that of the backward",
    )

    def __repr__(self) -> str:
        return f"<Program of {len(self.backward)} operations>"

    def completed_by(self, forward_length: int) -> dict[int, int]:
        """For each result that is kept on the host: the operation by whose end it is there."""
        sent = [op_id for op_id in self.packed if op_id < forward_length]
        return dict(zip(sent, self.completed, strict=False))

    def check(self, forward_length: int, count: int, masked: Collection[int]) -> None:
        """See that it runs the backward of a graph of so many operations, of which some are ReLU's backward.

        Raises:
            InconsistentError: It does not.
        """
        for name, readers in (("kept", frozenset()), ("packed", masked)):
            for position, op_id in enumerate(getattr(self, name)):
                if op_id >= forward_length and op_id not in readers:
                    other = ", nor the backward of ReLU" if name == "packed" else ""
                    message = f"operation {op_id} is not a forward operation{other}"
                    raise InconsistentError(message, name, position)
        if len(set(self.packed)) < len(self.packed):
            raise InconsistentError("an operation is named twice", "packed")
        sent = [op_id for op_id in self.packed if op_id < forward_length]
        if self.completed and len(self.completed) != len(sent):
            message = f"expected one for each of the {len(sent)} forward operations in packed"
            raise InconsistentError(message, "completed")
        for position, (op_id, last) in enumerate(zip(sent, self.completed, strict=False)):
            if not op_id <= last < forward_length:
                raise InconsistentError(
                    f"operation {last} is not a forward operation from {op_id} on", "completed", position
                )
        # No schedule runs the whole forward several times before each operation of the backward.
        again = len(self.backward) - (count - forward_length)
        most = 8 * forward_length * (count - forward_length)
        if again > most:
            message = f"{again} operations run again: no schedule of so few has more than {most}"
            raise InconsistentError(message, "backward")
        awaited = forward_length
        for position, op_id in enumerate(self.backward):
            if op_id >= count:
                message = f"operation {op_id} is not one of the {count} in ops"
                raise InconsistentError(message, "backward", position)
            if op_id < forward_length:
                continue
            if op_id != awaited:
                expected = (
                    f"backward operation {awaited} is next" if awaited < count else "all have run before it"
                )
                message = f"backward operation {op_id} stands out of order ({expected})"
                raise InconsistentError(message, "backward", position)
            awaited += 1
        if awaited < count:
            raise InconsistentError(f"backward operation {awaited} is never run", "backward")
        if self.backward and self.backward[-1] < forward_length:
            message = f"nothing reads what operation {self.backward[-1]} makes again at the end"
            raise InconsistentError(message, "backward", len(self.backward) - 1)


class ViewsRecord(Record):
    """A captured graph that only hands on views of its inputs, as far as the step differentiates it."""

    structure: Label = Field(description="identifies the graph whatever its sizes")
    occurrence: Index = Field(description="how many graphs of that structure come before it")
    occurrences: Index = Field(description="how many graphs of that structure the step has")
    unused_outputs: Listed[Index] = Field(
        max_length=MOST_OPS, description="outputs that get no gradient, which it computes"
    )


class GraphRecord(Program):
    """One captured graph and its schedule: the forward runs as captured, the backward as `backward` says."""

    fingerprint: Label = Field(description="identifies the graph together with its sizes")
    structure: Label = Field(description="identifies the graph whatever its sizes")
    occurrence: Index = Field(
        default=0,
        description="how many graphs of that structure come before it, those without a backward too",
    )
    occurrences: Index = Field(
        default=0, description="how many graphs of that structure the step has; 0: as many as are here"
    )
    places: Listed[Index] = Field(
        default=[],
        max_length=0,
        description="empty. Plans of earlier releases listed executions that were graphs of their own",
    )
    unused_outputs: Listed[Index] = Field(
        max_length=MOST_OPS, description="outputs of the module that get no gradient"
    )
    per_use_inputs: Listed[Index] = Field(
        default=[],
        max_length=MOST_OPS,
        description="inputs whose gradients leave the graph per use (unsummed), so that they are added in "
        "the order in which they are without a plan",
    )
    handed_inputs: Listed[Index] = Field(
        default=[],
        max_length=MOST_OPS,
        description="inputs that other graphs hand on to this one and that may be kept on the host: they are "
        "the first of `ops`, and `packed` and `backward` name them as they name operations",
    )
    gradient_layouts: Listed[GradientLayout] = Field(
        default=[],
        max_length=MOST_OPS,
        description="of outputs whose gradients have other strides than they do",
    )
    split: SplitRecord | None = Field(
        default=None, description="what it computes in pieces of rows; absent where it computes nothing so"
    )
    ops: Listed[OpRecord] = Field(
        min_length=1, max_length=MOST_OPS, description="forward operations, then backward"
    )
    other_programs: Listed[Program] = Field(
        default=[],
        max_length=_MOST_PROGRAMS,
        description="what the backward runs at other executions than the first",
    )
    executions: Listed[Index] = Field(
        default=[0],
        min_length=1,
        max_length=MOST_OPS,
        description="for every execution of the graph in a step, in order, what its backward runs: 0 is "
        "`backward`, 1 the first of `other_programs`, and so on",
    )

    def __repr__(self) -> str:
        return (
            f"<GraphRecord {self.structure[:12]}: {len(self.ops)} operations, {len(self.recomputed)} re-run>"
        )

    @property
    def forward_length(self) -> int:
        """How many operations the forward has; they come first in `ops`."""
        return sum(1 for _ in itertools.takewhile(lambda op: op.phase == "forward", self.ops))

    @property
    def recomputed(self) -> list[int]:
        """Ids of the forward operations that the backward re-runs, or unpacks, each once, ascending."""
        forward_length = self.forward_length
        return sorted({op for op in self.backward if op < forward_length})

    @property
    def programs(self) -> list[Self]:
        """A record of each program, as if it were the graph's only one."""
        alone = self.model_copy(update={"other_programs": [], "executions": [0]})
        others = [
            alone.model_copy(update={name: getattr(p, name) for name in Program.model_fields})
            for p in self.other_programs
        ]
        return [alone, *others]

    @property
    def by_execution(self) -> list[Self]:
        """The record of the program of each execution in a step, in order."""
        programs = self.programs
        return [programs[index] for index in self.executions]

    @model_validator(mode="after")
    def _is_a_schedule(self) -> Self:
        if self.occurrence >= max(self.occurrences, 1):
            raise InconsistentError(
                f"occurrence {self.occurrence} of {self.occurrences}; they count from 0", "occurrence"
            )
        forward_length, count = self.forward_length, len(self.ops)
        for index, op in enumerate(self.ops[forward_length:], forward_length):
            if op.phase == "forward":
                raise InconsistentError(
                    "a forward operation stands after a backward one", "ops", index, "phase"
                )
        masked = {i for i, op in enumerate(self.ops) if op.name == MASKED_BY_RESULT}
        self.check(forward_length, count, masked)
        for number, program in enumerate(self.other_programs):
            try:
                program.check(forward_length, count, masked)
            except InconsistentError as error:
                raise InconsistentError(str(error), "other_programs", number, *error.field) from None
        for position, index in enumerate(self.executions):
            if index > len(self.other_programs):
                message = f"{index} is none of the {1 + len(self.other_programs)} programs; they count from 0"
                raise InconsistentError(message, "executions", position)
        return self
