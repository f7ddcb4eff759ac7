"""What the operations of a step read and make: with it a plan can be simulated again, without the model.

Columns of numbers, as a step may have tens of thousands of operations. Values (storages) are numbered in the
order in which the step first makes them.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from planner.planfile.graph_record import OpRecord
from planner.planfile.schema import MOST_OPS, Count, InconsistentError, Index, Listed, Name, Record, Seconds

MOST_READS = 20_000_000
"""Ten for each of :data:`planner.planfile.schema.MOST_OPS`, which bounds what a hostile file takes."""

Indices = Annotated[Listed[Index], Field(max_length=MOST_OPS)]
Counts = Annotated[Listed[Count], Field(max_length=MOST_OPS)]
Reads = Annotated[Listed[Index], Field(max_length=MOST_READS)]
OrNone = Annotated[Listed[Annotated[int, Field(ge=-1, lt=MOST_OPS)]], Field(max_length=MOST_OPS)]


class StepRecord(Record):
    """The step as the solver saw it; the schedule is that of `graphs`."""

    graphs: OrNone = Field(
        description="for each operation of the step, in order: which of the plan's graphs it is of; -1: none"
    )
    ops: Indices = Field(description="its id in that graph, or its position in `outside`")
    executions: Indices = Field(
        default=[],
        description="for each operation which execution of its graph in the step it is of; empty: all "
        "of the first",
    )
    outside: Annotated[Listed[OpRecord], Field(max_length=MOST_OPS)] = Field(
        description="operations that run outside captured graphs"
    )
    forward_length: Count = Field(description="how many of the operations are of the forward")
    read_counts: Counts = Field(description="how many values each operation reads")
    reads: Reads = Field(description="the values that they read, one operation after the other")
    made_counts: Counts = Field(description="how many values each operation makes; they are numbered so")
    value_bytes: Counts = Field(description="bytes of each value")
    on_demand: Indices = Field(description="values that are there only in schedules that read them")
    held: Indices = Field(description="values that are held from outside the step's operations")
    held_until: Indices = Field(description="for each of them the operation after which it is let go")
    workspace_bytes: Counts = Field(description="what each operation allocates and frees inside")
    fixed: Indices = Field(description="operations of the forward that may not run again")
    replays: Indices = Field(description="operations that run again in another form than they first ran")
    replay_read_counts: Counts = Field(description="how many values each of these forms reads")
    replay_reads: Reads = Field(description="the values that they read")
    replay_made_counts: Counts = Field(description="how many values each of these forms makes")
    replay_makes: Indices = Field(description="the values that they make")
    replay_workspace_bytes: Counts = Field(description="what each of these forms allocates and frees inside")
    replay_seconds: Annotated[Listed[Seconds], Field(max_length=MOST_OPS)] = Field(
        default=[], description="the time of each of these forms; empty: as long as the operations take first"
    )
    left_bytes: Count = Field(
        default=0,
        description="in a pipeline: what a micro-batch leaves, beside gradients that are added up",
    )
    added_up: Counts = Field(
        default=[],
        description="in a pipeline, for each operation: by how much the gradients that an earlier "
        "micro-batch left exceed those of this one by then; empty where gradients are there already",
    )
    sent: Indices = Field(
        default=[],
        description="in a pipeline: values that go to the next stage, which every micro-batch holds until "
        "all have had their forward",
    )
    lines: Annotated[Listed[Name], Field(max_length=MOST_OPS)] = Field(
        description="lines of the model's code, as in net.py:12"
    )
    line_of: OrNone = Field(description="for each operation its line; -1: not known")

    def places(self) -> list[tuple[int, int, int]]:
        """For each operation of the step its graph, the execution of that, and its id there."""
        executions = self.executions or [0] * len(self.ops)
        return list(zip(self.graphs, executions, self.ops, strict=True))

    def __repr__(self) -> str:
        return f"<StepRecord: {len(self.ops)} operations, {len(self.value_bytes)} values>"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        count, values, replays = len(self.graphs), len(self.value_bytes), len(self.replays)
        for name, expected in (
            ("ops", count),
            ("executions", count if self.executions else 0),
            ("read_counts", count),
            ("reads", sum(self.read_counts)),
            ("made_counts", count),
            ("value_bytes", sum(self.made_counts)),
            ("held_until", len(self.held)),
            ("workspace_bytes", count),
            ("replay_read_counts", replays),
            ("replay_reads", sum(self.replay_read_counts)),
            ("replay_made_counts", replays),
            ("replay_makes", sum(self.replay_made_counts)),
            ("replay_workspace_bytes", replays),
            ("replay_seconds", replays if self.replay_seconds else 0),
            ("line_of", count),
            ("added_up", count if self.added_up else 0),
        ):
            found = len(getattr(self, name))
            if found != expected:
                raise InconsistentError(f"{found} entries where the others ask for {expected}", name)
        if len(set(self.held)) < len(self.held):
            raise InconsistentError("a value is named twice", "held")
        for name, below in (
            ("reads", values),
            ("on_demand", values),
            ("held", values),
            ("held_until", count),
            ("sent", values),
            ("fixed", count),
            ("replays", count),
            ("replay_reads", values),
            ("replay_makes", values),
            ("line_of", len(self.lines)),
        ):
            largest = max(getattr(self, name), default=-1)
            if largest >= below:
                raise InconsistentError(f"{largest} is not below {below}", name)
        if self.forward_length > count:
            raise InconsistentError(f"{self.forward_length} is more than the {count}", "forward_length")
        if len(set(self.replays)) != replays:
            raise InconsistentError("an operation is there twice", "replays")
        return self
