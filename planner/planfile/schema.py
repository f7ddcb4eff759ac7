"""The records that a plan is made of, each with the checks of its own fields."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, model_validator

from planner.choices import InputsAre, Offload, Outputs

if TYPE_CHECKING:
    import numpy as np

BackendName = Literal["eager", "replay", "inductor", "cudagraphs"]
"""What runs a plan, in this order: graphs, operator by operator; the module as written, with operators that
run again in the backward; the programs that Inductor makes of the graphs; graphs operator by operator, but
recorded as CUDA graphs."""

BY_OPERATORS = ("eager", "cudagraphs")
"""The backends that run a graph's operators as eager does."""

MOST_OPS = MOST_STEPS = 2_000_000
"""Operations of a graph, and rows of its schedule: bounds what it takes to read a hostile file."""
MOST_IN_FLIGHT = 1_000_000
"""Micro-batches of a pipeline."""
MOST_RANKS = 10_000_000
MOST_MEASURED = 1e15
"""Seconds of a schedule, and megabytes of a bucket."""
_TIMELINE_POINTS = 600

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Field(ge=0, le=MOST_MEASURED)]
Index = Annotated[int, Field(ge=0, lt=MOST_OPS)]
_MOST_CHARACTERS = 2000
Name = Annotated[str, StringConstraints(max_length=_MOST_CHARACTERS)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=256)]


_T = TypeVar("_T")
Listed = Annotated[list[_T], FailFast()]
"""A list that is refused at its first wrong entry: an error for each of millions takes gigabytes."""


def shortened(text: str) -> str:
    """A text as a plan file may hold it: some errors of PyTorch's list all arguments, and names of files may
    be in no encoding."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 4]} ..."


class InconsistentError(ValueError):
    """Fields that are right alone and wrong together; `field` is a path below the model that found it."""

    def __init__(self, message: str, *field: str | int) -> None:
        super().__init__(message)
        self.field = field


class Record(BaseModel):
    """What all records have in common: nothing changes, nothing unknown, no infinity and no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Footprint(Record):
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
            raise InconsistentError(
                f"{self.peak_bytes} is not resident_bytes + dynamic_peak_bytes = {total}", "peak_bytes"
            )
        return self


class Resident(Record):
    """Bytes that are there throughout the step, outside the schedule."""

    parameter_bytes: Count
    buffer_bytes: Count
    input_bytes: Count
    gradient_bytes: Count = Field(description="gradients that are there at entry, as when accumulating")
    optimizer_bytes: Count
    bucket_bytes: Count = Field(
        default=0, description="buckets of DistributedDataParallel, where the plan is for many ranks"
    )
    unreduced_bytes: Count = Field(
        default=0,
        description="whole gradients that fully_shard keeps between micro-batches, before they are reduced",
    )

    @property
    def total(self) -> int:
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.input_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.bucket_bytes
            + self.unreduced_bytes
        )


class WholeStep(Record):
    """A whole training step on its device, the optimizer's step included; a budget bounds the total."""

    forward_backward_bytes: Count = Field(description="peak of allocated bytes in forward and backward")
    optimizer_step_bytes: Count = Field(
        description="peak of allocated bytes in the optimizer's step: what is resident, gradients, outputs "
        "that are still held, and intermediate results"
    )
    allocated_bytes: Count = Field(description="the larger of the two")
    library_bytes: Count = Field(description="workspaces that matrix libraries allocate once and keep")
    recorded_bytes: Count = Field(
        default=0,
        description="with backend cudagraphs: copies of inputs, outputs and gradients that recorded graphs "
        "read and write, and workspaces of libraries in their pool",
    )
    fragmentation_bytes: Count = Field(
        description="what the caching allocator reserves beyond what is allocated and the libraries' "
        "workspaces: the step's allocations and frees, run through a simulation of it, with `arena` reserved "
        "beforehand"
    )
    arena: Listed[Count] = Field(
        default=[],
        max_length=100,
        description="bytes of the segments, each larger than the one before, that a planned module has the "
        "allocator reserve before its first step, so that less is lost between blocks; empty: none",
    )
    unarranged_fragmentation_bytes: Count | None = Field(
        default=None, description="fragmentation_bytes without an arena"
    )
    expandable_fragmentation_bytes: Count | None = Field(
        default=None, description="the same with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    context_bytes: Count = Field(description="what the CUDA context takes before there is a tensor")
    host_bytes: Count = Field(default=0, description="results that are kept on the host, or the disk")

    @property
    def used_bytes(self) -> int:
        """What the allocator hands out."""
        return self.allocated_bytes + self.library_bytes + self.recorded_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the allocator reserves, as ``torch.cuda.max_memory_reserved`` counts."""
        return self.used_bytes + self.fragmentation_bytes

    @property
    def unarranged_reserved_bytes(self) -> int | None:
        """What it reserves without an arena; None where there is none."""
        more = self.unarranged_fragmentation_bytes
        return None if more is None else self.used_bytes + more

    @property
    def expandable_reserved_bytes(self) -> int | None:
        """What it reserves with expandable segments; None where there is no such allocator."""
        more = self.expandable_fragmentation_bytes
        return None if more is None else self.used_bytes + more

    @property
    def total_bytes(self) -> int:
        """What the device must have."""
        return self.reserved_bytes + self.context_bytes

    @model_validator(mode="after")
    def _is_the_larger(self) -> Self:
        larger = max(self.forward_backward_bytes, self.optimizer_step_bytes)
        if self.allocated_bytes != larger:
            raise InconsistentError(
                f"{self.allocated_bytes} is not the larger of forward_backward_bytes and "
                f"optimizer_step_bytes, {larger}",
                "allocated_bytes",
            )
        return self


class TensorRecord(Record):
    """One tensor among the example inputs."""

    path: Name = Field(description="where it is in the arguments, as in args[0] or kwargs['labels']")
    shape: Listed[Count] = Field(max_length=64)
    dtype: Label
    device: Label
    requires_grad: bool
    strides: list[Count] | None = Field(
        default=None, max_length=64, description="steps in memory, where it is not contiguous"
    )


class ModelRecord(Record):
    """The model that was planned, and how it was called."""

    class_name: Name
    training: bool
    inputs: Listed[TensorRecord] = Field(max_length=100_000)
    outputs: Outputs = Field(
        default="held", description="whether the training loop still has the outputs while backward runs"
    )
    parameter_count: Count
    state_digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="SHA-256 over the names, shapes and dtypes of the model's state_dict"
    )
    autocast: Listed[Label] = Field(
        max_length=64, description="autocast regions that were on, as in cuda:bfloat16"
    )
    torch_version: Label
    regions: Listed[Name] = Field(
        default=[],
        max_length=100_000,
        description="submodules that have graphs, and an autograd node, of their own",
    )


class ParallelRecord(Record):
    """How the model is trained on many ranks; the plan is one rank's."""

    kind: Literal["fsdp2", "ddp", "tensor"]
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    tensor_ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = Field(
        default=1, description="fsdp2: among how many ranks parallelize_module distributed what is sharded"
    )
    reshard_after_forward: bool | Count | None = Field(
        default=None, description="fsdp2: whether parameters are freed after the forward"
    )
    param_dtype: Label | None = Field(default=None, description="fsdp2: what is computed in")
    reduce_dtype: Label | None = Field(default=None, description="fsdp2: what gradients are reduced in")
    no_sync: bool | None = Field(
        default=None,
        description="fsdp2: whether gradients of micro-batches are added up before they are reduced",
    )
    replicas: Annotated[int, Field(ge=1, le=MOST_RANKS)] = Field(
        default=1, description="fsdp2: in how many groups of ranks the model is sharded, each as the others"
    )
    kept_gathered: Listed[Name] = Field(
        default=[],
        max_length=100_000,
        description="fsdp2: regions that stay gathered after the forward, whatever others do; joined by + if "
        "they are gathered together",
    )
    bucket_cap_mb: Seconds | None = Field(default=None, description="ddp: megabytes of a bucket")
    gradient_as_bucket_view: bool | None = Field(
        default=None, description="ddp: whether gradients lie in the buckets"
    )

    @property
    def distributed_among(self) -> int:
        """Among how many ranks `parallelize_module` distributed the model; 1: it is whole."""
        return self.world_size if self.kind == "tensor" else self.tensor_ranks


class Target(Record):
    """What was planned for."""

    budget_bytes: Count | None = Field(
        description="most bytes the step may take; null: as few as can be reached"
    )
    budget_text: Name = Field(description="the budget as it was written")
    device: Label
    inputs: InputsAre = Field(
        default="unchanged",
        description="what happens before the backward to inputs, buffers and biases, which autograd may not "
        "save; overwritten: re-runs read copies of them",
    )
    costs: Name = Field(description="where the seconds of operations come from")
    workspace: Name = Field(description="where the scratch bytes of operations come from")
    parallel: ParallelRecord | None = Field(
        default=None, description="the ranks that train the model; null: a single process"
    )
    in_flight: Annotated[int, Field(ge=1, le=MOST_IN_FLIGHT)] | None = Field(
        default=None,
        description="micro-batches of a pipeline that have had their forward when the first backward begins; "
        "null: no pipeline",
    )
    backend: BackendName = Field(
        default="eager",
        description="what runs the graphs: eager's operators one by one, the programs that Inductor makes of "
        "them; replay: the module as it is, of which operators run again; or cudagraphs: eager's operators, "
        "recorded",
    )
    backend_options: dict[Label, bool | int | float | Name] = Field(
        default={}, max_length=100, description="options of Inductor"
    )
    offload: Offload = Field(
        default="none", description="where results are kept that `packed` names, masks among them as bits"
    )


BoundCovers = Literal[
    "every schedule",
    "schedules that pack no masks",
    "schedules that pack masks",
    "schedules that send nothing",
]


class SolverRecord(Record):
    """How the schedule was found. How long that took is in no file and does not count in comparisons, so that
    planning again gives the same."""

    name: Label
    status: Label
    gap: Annotated[float, Field(ge=0)] | None = Field(description="0.01: at most 1 % slower than possible")
    bound_seconds: Seconds | None = Field(
        description="no schedule within the budget, of those that `bound_covers` names, is faster than this"
    )
    bound_covers: BoundCovers = Field(
        default="every schedule",
        description="which schedules the bound, the gap and the status hold for: all; those that keep masks "
        "whole or recompute them; those that may also keep them as bits; those that keep nothing on the host",
    )
    solve_seconds: Seconds | None = Field(default=None, description="not written; in older files")
    capture_seconds: Seconds | None = Field(default=None, description="not written; in older files")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SolverRecord) and self._found() == other._found()

    def __hash__(self) -> int:
        return hash(self._found())

    def _found(self) -> tuple[object, ...]:
        return self.name, self.status, self.gap, self.bound_seconds, self.bound_covers


class LiveModule(Record):
    """A module, and what it holds when memory is at its peak."""

    module: Name
    bytes: Count


class Timeline(Record):
    """Live bytes over the entry of the step, along its forward and backward."""

    bytes: Listed[Count] = Field(max_length=100_000)
    peak_index: Annotated[int, Field(ge=0)]
    forward_length: Annotated[int, Field(ge=0)] = Field(
        description="how many of the points are of the forward"
    )

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.bytes)} points, at most {max(self.bytes, default=0):,} bytes>"

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
        # The two are thinned apart, so that no stretch spans both forward and backward.
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
            raise InconsistentError("a timeline has at least one point", "bytes")
        if self.peak_index >= len(self.bytes):
            raise InconsistentError(
                f"{self.peak_index} is not one of the {len(self.bytes)} points", "peak_index"
            )
        if self.bytes[self.peak_index] != max(self.bytes):
            raise InconsistentError(f"point {self.peak_index} is not the largest", "peak_index")
        if self.forward_length > len(self.bytes):
            message = f"{self.forward_length} is more than the {len(self.bytes)} points"
            raise InconsistentError(message, "forward_length")
        return self
