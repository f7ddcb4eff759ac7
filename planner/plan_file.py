"""The plan: what is kept, what is re-run and where, what that promises, and how it is stored as JSON.

A plan file is data from outside. Loading one checks every field, its type, its range and how the fields
fit together, and runs nothing. `docs/plan-file.md` describes the format; `docs/plan.schema.json` is
generated from the models below.
"""

import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import from_json

from planner.errors import PlanFileError
from planner.files import laid_out, reason, write_atomically

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

SCHEMA_VERSION = 1
LARGEST_FILE_BYTES = 512 * 2**20

_MOST_OPS = 2_000_000
_MOST_STEPS = 20_000_000
_TIMELINE_POINTS = 600

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Field(ge=0, le=1e15)]
Index = Annotated[int, Field(ge=0, lt=_MOST_OPS)]
Name = Annotated[str, StringConstraints(max_length=2000)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Inconsistent(ValueError):
    """Fields that are right alone and wrong together; `field` is a path below the model that found it."""

    def __init__(self, message: str, *field: str | int) -> None:
        super().__init__(message)
        self.field = field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, revalidate_instances="never")


class Footprint(_Record):
    """What one training step takes."""

    peak_bytes: Count = Field(description="resident_bytes + dynamic_peak_bytes")
    dynamic_peak_bytes: Count = Field(
        description="most bytes that the step holds over what was there at entry"
    )
    resident_bytes: Count = Field(description="bytes that are there throughout: the total of `resident`")
    seconds: Seconds = Field(description="time of forward and backward by the plan's cost source")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = self.resident_bytes + self.dynamic_peak_bytes
        if self.peak_bytes != total:
            raise _Inconsistent(
                f"{self.peak_bytes} is not resident_bytes + dynamic_peak_bytes = {total}", "peak_bytes"
            )
        return self


class Resident(_Record):
    """Bytes that are there throughout the step, outside the schedule."""

    parameter_bytes: Count
    buffer_bytes: Count
    input_bytes: Count
    gradient_bytes: Count = Field(description="gradients that are there at entry, as when accumulating")
    optimizer_bytes: Count

    @property
    def total(self) -> int:
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.input_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
        )


class TensorRecord(_Record):
    """One tensor among the example inputs."""

    path: Name = Field(description="where it is in the arguments, as in args[0] or kwargs['labels']")
    shape: list[Count] = Field(max_length=64)
    dtype: Label
    device: Label
    requires_grad: bool


class ModelRecord(_Record):
    """The model that was planned, and how it was called."""

    class_name: Name
    training: bool
    inputs: list[TensorRecord] = Field(max_length=100_000)
    parameter_count: Count
    state_digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="SHA-256 over the names, shapes and dtypes of the model's state_dict"
    )
    autocast: list[Label] = Field(
        max_length=64, description="autocast regions that were on, as in cuda:bfloat16"
    )
    torch_version: Label


class OpRecord(_Record):
    """One operation of a captured graph; its index in the list is its stable id."""

    name: Name = Field(description="as in aten.addmm.default")
    module: Name = Field(
        description="path of the module that ran it, as in encoder.layer.0.attention; empty: the root"
    )
    bytes: Count = Field(description="bytes of the storages that it makes")
    phase: Literal["forward", "backward"]
    seconds: Seconds


class GraphRecord(_Record):
    """One captured graph and its schedule: the forward runs as captured, the backward as `backward` says."""

    fingerprint: Label = Field(description="identifies the graph together with its sizes")
    structure: Label = Field(description="identifies the graph whatever its sizes")
    unused_outputs: list[Index] = Field(
        max_length=_MOST_OPS, description="outputs of the module that get no gradient"
    )
    ops: list[OpRecord] = Field(
        min_length=1, max_length=_MOST_OPS, description="forward operations, then backward"
    )
    backward: list[Index] = Field(
        max_length=_MOST_STEPS,
        description="ids of operations in the order in which the backward runs them: each backward operation "
        "once, and forward operations wherever they are re-run",
    )

    @property
    def forward_length(self) -> int:
        """How many operations the forward has; they come first in `ops`."""
        return sum(1 for _ in itertools.takewhile(lambda op: op.phase == "forward", self.ops))

    @property
    def recomputed(self) -> list[int]:
        """Ids of the forward operations that the backward re-runs, each once, ascending."""
        forward_length = self.forward_length
        return sorted({op for op in self.backward if op < forward_length})

    @model_validator(mode="after")
    def _is_a_schedule(self) -> Self:
        forward_length, count = self.forward_length, len(self.ops)
        for index, op in enumerate(self.ops[forward_length:], forward_length):
            if op.phase == "forward":
                raise _Inconsistent("a forward operation stands after a backward one", "ops", index, "phase")
        awaited = forward_length
        for position, op_id in enumerate(self.backward):
            if op_id >= count:
                message = f"operation {op_id} is not one of the {count} in ops"
                raise _Inconsistent(message, "backward", position)
            if op_id < forward_length:
                continue
            if op_id != awaited:
                expected = (
                    f"backward operation {awaited} is next" if awaited < count else "all have run before it"
                )
                message = f"backward operation {op_id} stands out of order ({expected})"
                raise _Inconsistent(message, "backward", position)
            awaited += 1
        if awaited < count:
            raise _Inconsistent(f"backward operation {awaited} is never run", "backward")
        return self


class Target(_Record):
    """What was planned for."""

    budget_bytes: Count | None = Field(
        description="most bytes the step may take; null: as few as can be reached"
    )
    budget_text: Name = Field(description="the budget as it was written")
    device: Label
    costs: Name = Field(description="where the seconds of operations come from")
    workspace: Name = Field(description="where the scratch bytes of operations come from")


class SolverRecord(_Record):
    """How the schedule was found."""

    name: Label
    status: Label
    gap: Annotated[float, Field(ge=0)] | None = Field(description="0.01: at most 1 % slower than possible")
    bound_seconds: Seconds | None = Field(description="no schedule within the budget is faster than this")
    solve_seconds: Seconds
    capture_seconds: Seconds


class Holder(_Record):
    """A module, and what it holds when memory is at its peak."""

    module: Name
    bytes: Count


class Timeline(_Record):
    """Live bytes over the entry of the step, along its forward and backward."""

    bytes: list[Count] = Field(max_length=100_000)
    peak_index: Annotated[int, Field(ge=0)]
    forward_length: Annotated[int, Field(ge=0)] = Field(
        description="how many of the points are of the forward"
    )

    @classmethod
    def downsample(cls, array: "np.ndarray[Any, Any] | Sequence[int]", forward_length: int) -> Self:
        """Keep at most 600 points of a timeline: of every stretch its largest, so that the peak stays.

        Args:
            array: live bytes after each step, at least one.
            forward_length: how many of the steps are of the forward.
        """
        live = [int(value) for value in array]
        if not 0 <= forward_length <= len(live):
            raise ValueError(f"forward_length {forward_length} is not within the {len(live)} steps")
        stride = max(1, math.ceil(len(live) / (_TIMELINE_POINTS - 2)))
        forward, backward = live[:forward_length], live[forward_length:]
        # The two are thinned apart, so that no stretch spans the turn from forward to backward.
        points = [
            max(part[start : start + stride])
            for part in (forward, backward)
            for start in range(0, len(part), stride)
        ]
        peak_index = max(range(len(points)), key=points.__getitem__, default=0)
        return cls(bytes=points, peak_index=peak_index, forward_length=math.ceil(forward_length / stride))

    @model_validator(mode="after")
    def _peak_is_the_peak(self) -> Self:
        if not self.bytes:
            raise _Inconsistent("a timeline has at least one point", "bytes")
        if self.peak_index >= len(self.bytes):
            raise _Inconsistent(f"{self.peak_index} is not one of the {len(self.bytes)} points", "peak_index")
        if self.bytes[self.peak_index] != max(self.bytes):
            raise _Inconsistent(f"point {self.peak_index} is not the largest", "peak_index")
        if self.forward_length > len(self.bytes):
            message = f"{self.forward_length} is more than the {len(self.bytes)} points"
            raise _Inconsistent(message, "forward_length")
        return self


class Plan(_Record):
    """A training step within a memory budget: its schedule, and what that schedule promises."""

    schema_version: Literal[1] = 1
    created_with: dict[Label, Label] = Field(max_length=100, description="versions of what made the plan")
    rung: Literal["one-graph", "several-graphs"] = Field(description="how much of the model one graph covers")
    model: ModelRecord
    target: Target
    solver: SolverRecord
    resident: Resident
    predicted: Footprint = Field(description="the step with this plan")
    baseline: Footprint = Field(description="the step as PyTorch runs it without a plan")
    no_recompute: Footprint = Field(description="the captured step when nothing is recomputed")
    graphs: list[GraphRecord] = Field(min_length=1, max_length=10_000)
    timeline: Timeline
    baseline_timeline: Timeline
    peak_holders: list[Holder] = Field(max_length=10_000, description="what is alive at the planned peak")
    notes: list[Name] = Field(max_length=1000)

    @property
    def overhead(self) -> float:
        """Extra time of the planned step over the one that recomputes nothing: 0.05 is 5 %."""
        if self.no_recompute.seconds == 0:
            return 0.0
        return self.predicted.seconds / self.no_recompute.seconds - 1

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for field in ("predicted", "baseline", "no_recompute"):
            found = getattr(self, field).resident_bytes
            if found != self.resident.total:
                message = f"{found} is not the total of `resident`, {self.resident.total}"
                raise _Inconsistent(message, field, "resident_bytes")
        budget_bytes = self.target.budget_bytes
        if budget_bytes is not None and self.predicted.peak_bytes > budget_bytes:
            message = f"{self.predicted.peak_bytes} is more than the budget of {budget_bytes}"
            raise _Inconsistent(message, "predicted", "peak_bytes")
        if self.rung == "one-graph" and len(self.graphs) != 1:
            raise _Inconsistent(f"there are {len(self.graphs)} where the rung is one-graph", "graphs")
        return self

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Make the module train by this plan, in place.

        Returns:
            the same module; `planner.remove(model)` undoes it.

        Raises:
            PlanMismatch: the plan is of another model.
        """
        from planner.install import apply

        return apply(self, model)

    def dumps(self) -> str:
        """Write the plan as JSON text, laid out for people: one operation a line."""
        return laid_out(self.model_dump(mode="json")) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanFileError: the file cannot be written; what was there before is untouched.
        """
        write_atomically(path, self.dumps())

    @classmethod
    def loads(cls, text: str | bytes, *, source: str = "plan") -> Self:
        """Read a plan from JSON text and check all of it.

        Args:
            text: the JSON.
            source: what to call the text in errors.

        Raises:
            PlanFileError: names the source, the field that is wrong, and what is wrong with it.
        """
        try:
            data = from_json(text, allow_inf_nan=True, cache_strings="keys")
        except ValueError as error:
            raise PlanFileError(f"{source}: not valid JSON, or cut short: {error}") from None
        if not isinstance(data, dict):
            raise PlanFileError(f"{source}: a plan is a JSON object, this is {_json_type(data)}")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            found = "missing" if version is None else f"{version!r:.40}"
            raise PlanFileError(f"{source}: schema_version: {found}, this release reads {SCHEMA_VERSION}")
        try:
            return cls.model_validate(data, strict=True)
        except ValidationError as error:
            raise PlanFileError(f"{source}: {_first_problem(error)}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a file and check all of it.

        Raises:
            PlanFileError: names the file, the field that is wrong, and what is wrong with it.
        """
        source = os.fspath(path)
        try:
            with open(source, "rb") as file:
                content = file.read(LARGEST_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise PlanFileError(f"{source}: cannot be read: {reason(error)}") from None
        if len(content) > LARGEST_FILE_BYTES:
            raise PlanFileError(f"{source}: larger than {LARGEST_FILE_BYTES} bytes, too large for a plan")
        return cls.loads(content, source=source)


def plan_schema() -> dict[str, Any]:
    """The JSON schema of plan files."""
    schema = Plan.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    cause = first.get("ctx", {}).get("error")
    location: tuple[str | int, ...] = first["loc"]
    if isinstance(cause, _Inconsistent):
        message = str(cause)
        location = (*location, *cause.field)
    else:
        message = first["msg"].lower()
        if not isinstance(first["input"], dict | list):
            message += f" (found {repr(first['input'])[:60]})"
    field = ""
    for part in location:
        field += f"[{part}]" if isinstance(part, int) else f"{'.' if field else ''}{part}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{field}: {message}{more}"


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
