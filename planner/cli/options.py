"""The options that commands of the command line share, with their help."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner import choices
from planner.cli.builder import load_reference

if TYPE_CHECKING:
    from planner.planning.options import StepKeywords

Reference = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="Returns (model, args[, kwargs]), as pkg.module:build or path/to/file.py:build.",
        show_default=False,
    ),
]
PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
Loss = Annotated[
    str | None,
    typer.Option(
        "--loss", metavar="MODULE:FUNCTION", help="A function from the model's output to a scalar loss."
    ),
]


OutputsName = Annotated[
    choices.Outputs,
    typer.Option(
        "--outputs",
        help="held: the training loop still has the model's outputs while backward runs; dropped: it has "
        "only the loss, as in trainers.",
    ),
]
MeasuredOutputs = Annotated[
    choices.Outputs | None,
    typer.Option("--outputs", help="held or dropped while backward runs; as planned if not given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
FigurePath = Annotated[
    str | None,
    typer.Option("--figure", metavar="FILE", help="Draw the plan as well, into a .png, .svg or .pdf."),
]


Solver = Annotated[str, typer.Option(help="How to search for the plan.")]
DeviceName = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, or a device to plan for without having it, as A100-80GB."),
]
OptimizerName = Annotated[str | None, typer.Option(help="An optimizer whose state to count, as adamw.")]
AttentionName = Annotated[
    choices.Attention | None,
    typer.Option(help="Planning for a GPU without one: its attention kernel, if not PyTorch's choice."),
]
CostName = Annotated[
    choices.CostSource,
    typer.Option(help="Seconds of operations: by the device's figures, or timed on the device at hand."),
]
Accumulate = Annotated[
    bool | None,
    typer.Option("--accumulate", help="Gradients are there when the step begins, and are added to."),
]
InputsName = Annotated[
    choices.InputsAre,
    typer.Option(
        "--inputs",
        help="Whether inputs, buffers or biases are overwritten before the backward: it then reads copies.",
    ),
]
EffortName = Annotated[
    Literal["fast", "best"],
    typer.Option("--effort", help="How long solver auto searches: fast, or best for up to a minute."),
]
EncodingsName = Annotated[
    choices.Encodings,
    typer.Option(help="Whether masks may be kept as bits, eight to a byte, where that is better."),
]
OffloadName = Annotated[
    choices.Offload,
    typer.Option(
        help="Where results may be kept until the backward reads them: disk for the CPU, host for a GPU."
    ),
]
HostBudget = Annotated[
    str | None, typer.Option(metavar="BYTES", help="The most that may be kept there, as 64GiB.")
]
BackendName = Annotated[
    choices.BackendChoice,
    typer.Option(
        "--backend",
        help="What runs the plan: graphs of eager's operators (graph, or eager), the module as it is with "
        "operators that are replayed, auto for one of these, the programs that Inductor makes of graphs, or "
        "graphs that are recorded as CUDA graphs.",
    ),
]
SplitName = Annotated[
    choices.SplitWhat,
    typer.Option(
        "--split",
        help="loss: compute what ends in the loss in pieces of rows, where that is better; auto: and MLPs. "
        "Gradients then differ in the last bits. Takes --outputs dropped.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Never recompute this module or operator (a pattern; repeatable)."),
]
Again = Annotated[
    list[str] | None,
    typer.Option("--recompute", metavar="NAME", help="Never keep this module or operator (repeatable)."),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option("--checkpoint", metavar="NAME", help="Keep this module's result (for --solver manual)."),
]
Regions = Annotated[
    list[str] | None,
    typer.Option(
        "--region",
        metavar="NAME",
        help="Make this module graphs and an autograd node of its own (repeatable); auto: those that repeat.",
    ),
]
ParallelName = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="fsdp2:8",
        help="Plan one of many ranks, which need not be here: fsdp2:8 or ddp:8, with further arguments "
        "behind commas, as fsdp2:8,param_dtype=bfloat16,reduce_dtype=float32,reshard_after_forward=false; "
        "no_sync=true: gradients of micro-batches are added up before they are reduced.",
    ),
]
Unproven = Annotated[
    bool, typer.Option("--unproven", help="Allow what has never run on a GPU: inductor there, cudagraphs.")
]
InFlight = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="For a stage of a pipeline: how many micro-batches have had their forward when the first "
        "backward begins.",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        help="8GiB, 8GB, bytes, 60% of the unplanned step's peak, min, or min@33%: the least at that extra "
        "time.",
    ),
]
PlanFile = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan to this file.")
]


@dataclass(frozen=True)
class StepOptions:
    """The options about the step, of every command that plans: the keywords of the same names in Python."""

    loss: Loss = None
    outputs: OutputsName = "held"
    optimizer: OptimizerName = None
    device: DeviceName = None
    attention: AttentionName = None
    accumulate: Accumulate = None
    in_flight: InFlight = None
    costs: CostName = "auto"
    inputs: InputsName = "unchanged"
    effort: EffortName = "fast"
    encodings: EncodingsName = "auto"
    offload: OffloadName = "none"
    host_budget: HostBudget = None
    regions: Regions = None
    parallel: ParallelName = None
    unproven: Unproven = False

    def keywords(self) -> "StepKeywords":
        """What to pass to :func:`planner.plan`, ``sweep`` or ``max_batch``."""
        given: Any = {field.name: getattr(self, field.name) for field in fields(self)}
        given["regions"] = "auto" if self.regions == ["auto"] else self.regions or None
        if self.loss is not None:
            given["loss"] = load_reference(self.loss)
        return given  # type: ignore[no-any-return]


def with_step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of :class:`StepOptions` as options, and pass them to it as ``step``."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != "step"]
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(StepOptions)
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        step = StepOptions(**{f.name: given.pop(f.name) for f in fields(StepOptions)})
        command(**given, step=step)

    wrapped.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return wrapped
