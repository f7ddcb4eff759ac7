"""The plan: what is kept, what is re-run and where, what that promises, and how it is stored as JSON.

A plan file is data from outside. Loading one checks every field, its type, its range and how the fields
fit together, and runs nothing. `docs/plan-file.md` describes the format; `docs/plan.schema.json` is
generated from the models.
"""

import math
import os
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import from_json

from planner._torch.inductor.fusion_names import Fusion
from planner.errors import PlanFileError, printable
from planner.heap import read_at_most
from planner.planfile.atomic_file import reason, write_atomically
from planner.planfile.budget import format_bytes
from planner.planfile.graph_record import (
    GradientLayout,
    GraphRecord,
    OpRecord,
    Program,
    SplitRecord,
    SplitRun,
    ViewsRecord,
)
from planner.planfile.json_layout import laid_out
from planner.planfile.replay_record import ReplayRecord
from planner.planfile.schema import (
    MOST_OPS,
    Footprint,
    InconsistentError,
    Label,
    Listed,
    LiveModule,
    ModelRecord,
    Name,
    ParallelRecord,
    Record,
    Resident,
    SolverRecord,
    Target,
    TensorRecord,
    Timeline,
    WholeStep,
)
from planner.planfile.step_record import StepRecord

__all__ = [
    "Footprint",
    "GradientLayout",
    "GraphRecord",
    "LiveModule",
    "ModelRecord",
    "OpRecord",
    "ParallelRecord",
    "PlanRecord",
    "Program",
    "ReplayRecord",
    "Resident",
    "SolverRecord",
    "SplitRecord",
    "SplitRun",
    "StepRecord",
    "Target",
    "TensorRecord",
    "Timeline",
    "ViewsRecord",
    "WholeStep",
    "plan_schema",
]

Coverage = Literal["one-graph", "several-graphs", "partly-captured", "replayed"]

SCHEMA_VERSION = 2
LARGEST_FILE_BYTES = 512 * 2**20
_MOST_RUN = 20_000_000
"""Operations that the backwards of a step run, all executions together. Both bound what a hostile file
takes."""


class PlanRecord(Record):
    """A training step within a memory budget: its schedule, and what that schedule promises."""

    model_config = ConfigDict(title="Plan")

    _made_with: Any = PrivateAttr(default=None)

    schema_version: Literal[2] = 2
    created_with: dict[Label, Label] = Field(
        max_length=100, description="versions of what made the plan, and on a CPU the number of its threads"
    )
    coverage: Coverage = Field(
        description="one-graph: a graph holds all of the forward; several-graphs: several do, planned as one "
        "step; partly-captured: operations between graphs run as written; replayed: no graph is captured"
    )
    model: ModelRecord
    target: Target
    solver: SolverRecord
    resident: Resident
    predicted: Footprint = Field(description="the step with this plan")
    baseline: Footprint = Field(description="the step as PyTorch runs it without a plan")
    no_recompute: Footprint = Field(description="the captured step when nothing is recomputed")
    whole_step: WholeStep | None = Field(
        default=None,
        description="the planned step with the optimizer's own, on the device; bounded by the budget",
    )
    baseline_whole_step: WholeStep | None = Field(
        default=None, description="the same without a plan; percent budgets are of its allocated_bytes"
    )
    as_written: bool = Field(
        default=False,
        description="the module runs as written, without the schedule: none was found that takes as little",
    )
    graphs: Listed[GraphRecord] = Field(min_length=1, max_length=10_000)
    forward_only: Listed[Label] = Field(
        default=[],
        max_length=10_000,
        description="structures of graphs of which the step differentiates nothing: they run as captured",
    )
    views: Listed[ViewsRecord] = Field(
        default=[],
        max_length=10_000,
        description="graphs without a schedule: only outputs that are views of inputs are differentiated. "
        "Listed are those that compute something else too, or that have the structure of a graph in `graphs`",
    )
    fusion: Fusion = Field(
        default="in-order",
        description="what Inductor fuses, where it runs the graphs: what it chooses (anywhere), only what no "
        "call of a library lies between (in-order), or also what takes no memory before one (earlier)",
    )
    timeline: Timeline
    baseline_timeline: Timeline
    peak_holders: Listed[LiveModule] = Field(
        max_length=10_000, description="what is alive at the planned peak"
    )
    notes: Listed[Name] = Field(max_length=1000)
    step: StepRecord | None = Field(
        default=None,
        description="what operations read and make, for readers: with it the schedule can be simulated again",
    )
    replay: ReplayRecord | None = Field(
        default=None,
        description="how the calls of the step are put together, where it is followed by replaying",
    )

    @property
    def overhead(self) -> float:
        """Extra time of the planned step over the one that recomputes nothing: 0.05 is 5 %. That one
        takes longer in pieces as well: of these plans it is over the unplanned step."""
        without = self.baseline if any(graph.split for graph in self.graphs) else self.no_recompute
        if without.seconds == 0:
            return 0.0
        return self.predicted.seconds / without.seconds - 1

    @property
    def is_exact(self) -> bool:
        """Whether gradients equal those without the plan bit for bit: not by Inductor, and not in pieces."""
        return self.target.backend != "inductor" and not any(graph.split for graph in self.graphs)

    @property
    def recomputed_operations(self) -> int:
        """How many operations of the forward the backward re-runs, in all executions of all graphs. One that
        is re-run several times counts once; what is unpacked or fetched does not count."""
        runs = [run for graph in self.graphs for run in graph.by_execution]
        return sum(len(set(run.recomputed).difference(run.packed)) for run in runs)

    @property
    def forward_operations(self) -> int:
        """How many operations the forward has, in all executions of all graphs."""
        return sum(graph.forward_length * len(graph.executions) for graph in self.graphs)

    def __repr__(self) -> str:
        whole, unplanned = self.predicted.peak_bytes, self.baseline.peak_bytes
        named = [printable(n) for n in (self.model.class_name, self.target.budget_text, self.target.device)]
        packed = sum(len(run.packed) for graph in self.graphs for run in graph.by_execution)
        place = self.target.offload
        how = "masks as bits" if place == "none" else f"results on the {place}"
        return (
            f"<Plan of {named[0]} for {named[1]} on {named[2]}: peak "
            f"{format_bytes(whole)} instead of {format_bytes(unplanned)}, time {self.overhead:+.1%}, re-runs "
            f"{self.recomputed_operations} of {self.forward_operations} operations"
            f"{f', {packed} {how}' if packed else ''}>"
        )

    def __str__(self) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        # A record that was read from a file equals the plan that users made of it.
        if not isinstance(other, PlanRecord):
            return NotImplemented
        return vars(self) == vars(other)  # but for what they were made with

    def __hash__(self) -> int:
        return hash((self.model.state_digest, self.target.budget_text, self.predicted.peak_bytes))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for field in ("predicted", "baseline", "no_recompute"):
            found = getattr(self, field).resident_bytes
            if found != self.resident.total:
                message = f"{found} is not the total of `resident`, {self.resident.total}"
                raise InconsistentError(message, field, "resident_bytes")
        budget_bytes = self.target.budget_bytes
        if budget_bytes is not None and self.predicted.peak_bytes > budget_bytes:
            message = f"{self.predicted.peak_bytes} is more than the budget of {budget_bytes}"
            raise InconsistentError(message, "predicted", "peak_bytes")
        whole = self.whole_step
        if whole is not None and whole.forward_backward_bytes != self.predicted.peak_bytes:
            message = (
                f"{whole.forward_backward_bytes} is not predicted.peak_bytes, {self.predicted.peak_bytes}"
            )
            raise InconsistentError(message, "whole_step", "forward_backward_bytes")
        if budget_bytes is not None and whole is not None and whole.total_bytes > budget_bytes:
            message = f"{whole.total_bytes} in all is more than the budget of {budget_bytes}"
            raise InconsistentError(message, "whole_step")
        if self.coverage == "one-graph" and len(self.graphs) != 1:
            raise InconsistentError(f"there are {len(self.graphs)} where the coverage is one-graph", "graphs")
        self._check_size()
        if self.target.offload == "none":
            for index, graph in enumerate(self.graphs):
                if any(program.completed for program in (graph, *graph.other_programs)):
                    raise InconsistentError("nothing is kept on the host", "graphs", index, "completed")
        if not math.isfinite(self.overhead):
            message = f"{self.predicted.seconds} is too much beside the seconds without the plan"
            raise InconsistentError(message, "predicted", "seconds")
        regions = self.model.regions
        if len(set(regions)) != len(regions):
            raise InconsistentError("a submodule is there twice", "model", "regions")
        if self.step is not None:
            self._check_step(self.step)
        if (self.target.backend == "replay") != (self.replay is not None):
            raise InconsistentError(
                "it is there for plans of the backend 'replay', and for no others", "replay"
            )
        if self.replay is not None:
            self._check_replay(self.replay)
        return self

    def _check_size(self) -> None:
        """Refuse a small file that lists so many long executions that going through them would never end."""
        ran = again = 0
        for index, graph in enumerate(self.graphs):
            lengths = [len(p.backward) for p in (graph, *graph.other_programs)]
            ran += len(graph.ops) * len(graph.executions)
            again += sum(lengths[program] for program in graph.executions)
            if ran > MOST_OPS or again > _MOST_RUN:
                message = f"a step of {max(ran, again)} operations is larger than any that is planned"
                raise InconsistentError(message, "graphs", index, "executions")

    def _check_step(self, step: StepRecord) -> None:
        lengths = [len(graph.ops) for graph in self.graphs]
        for position, (graph, execution, op) in enumerate(step.places()):
            if graph >= len(lengths):
                message = f"graph {graph} is not one of the {len(lengths)} in graphs"
                raise InconsistentError(message, "step", "graphs", position)
            if graph >= 0 and execution >= (most := len(self.graphs[graph].executions)):
                message = f"{execution} is not one of the {most} of graph {graph}"
                raise InconsistentError(message, "step", "executions", position)
            most = lengths[graph] if graph >= 0 else len(step.outside)
            if op >= most:
                raise InconsistentError(f"{op} is not one of {most}", "step", "ops", position)

    def _check_replay(self, replay: ReplayRecord) -> None:
        if self.step is None or len(self.graphs) != 1:
            raise InconsistentError("one graph and `step` belong to a plan that is replayed", "replay")
        values, ops = len(self.step.value_bytes), len(self.graphs[0].ops)
        for name, below in (
            ("ids", ops),
            ("entries", ops),
            ("operands", values),
            ("results", values),
            ("written", values),
            ("saves", values),
        ):
            largest = max(getattr(replay, name), default=-1)
            if largest >= below:
                raise InconsistentError(f"{largest} is not below {below}", "replay", name)

    @property
    def made_with(self) -> object:
        """What the plan was made with, for planning again; None of a plan that was read from a file."""
        return self._made_with

    def remember(self, options: object) -> Self:
        """The same plan, which remembers what it was made with."""
        self._made_with = options
        return self

    def dumps(self) -> str:
        """Write the plan as JSON text, laid out for people: one operation a line.

        The same step planned again gives the same text: how long planning took is left out.
        """
        times = {"solver": {"solve_seconds", "capture_seconds"}}
        return laid_out(self.model_dump(mode="json", exclude=times)) + "\n"

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
        if isinstance(text, str):
            text = text.encode(errors="surrogatepass")  # the JSON reader says what is wrong with these
        if text.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise PlanFileError(
                f"{source}: it is UTF-16 or UTF-32, expected UTF-8: save it as that, or plan again"
            )
        text = text.removeprefix(b"\xef\xbb\xbf")  # the mark that editors put before UTF-8
        try:
            # Infinities and NaNs are refused by the records, which name the field.
            data = from_json(text, allow_inf_nan=True, cache_strings="keys")
        except ValueError as error:
            raise PlanFileError(f"{source}: not valid JSON, or cut short: {error}") from None
        if not isinstance(data, dict):
            raise PlanFileError(f"{source}: a plan is a JSON object, this is {_json_type(data)}")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            found = "missing" if version is None else f"{version!r:.40}"
            raise PlanFileError(f"{source}: schema_version: {found}, this release reads {SCHEMA_VERSION}")
        data.pop("untraced", None)  # earlier releases wrote it
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
            content = read_at_most(source, LARGEST_FILE_BYTES)
        except (OSError, ValueError) as error:
            raise PlanFileError(f"{source}: cannot be read: {reason(error)}") from None
        if len(content) > LARGEST_FILE_BYTES:
            raise PlanFileError(f"{source}: larger than {LARGEST_FILE_BYTES} bytes, too large for a plan")
        return cls.loads(content, source=source)


def plan_schema() -> dict[str, Any]:
    """The JSON schema of plan files."""
    schema = PlanRecord.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    cause = first.get("ctx", {}).get("error")
    location: tuple[str | int, ...] = first["loc"]
    if isinstance(cause, InconsistentError):
        message = str(cause)
        location = (*location, *cause.field)
    else:
        message = first["msg"].lower()
        if not isinstance(first["input"], dict | list):
            message += f" (found {repr(first['input'])[:60]})"
    field = ""
    for part in location:
        field += f"[{part}]" if isinstance(part, int) else f"{'.' if field else ''}{part}"
    field = printable(field[:200])  # one that is not known is named by the file
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{field}: {message}{more}"


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
