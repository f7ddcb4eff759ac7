"""The options that commands of the command line share, with their help."""

from enum import StrEnum
from typing import Annotated

import typer

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


class Outputs(StrEnum):
    """Whether the training loop still has the module's outputs while backward runs."""

    held = "held"
    dropped = "dropped"


OutputsName = Annotated[
    Outputs,
    typer.Option(
        "--outputs",
        help="held: the training loop still has the model's outputs while backward runs; dropped: it has "
        "only the loss, as in trainers.",
    ),
]
MeasuredOutputs = Annotated[
    Outputs | None,
    typer.Option("--outputs", help="held or dropped while backward runs; as planned if not given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
FigurePath = Annotated[
    str | None,
    typer.Option("--figure", metavar="FILE", help="Draw the plan as well, into a .png, .svg or .pdf."),
]


class CostSource(StrEnum):
    """Where the seconds of operations come from."""

    roofline = "roofline"
    measured = "measured"


class Attention(StrEnum):
    """Kernels of scaled dot product attention."""

    cudnn = "cudnn"
    flash = "flash"
    efficient = "efficient"
    math = "math"


class Inputs(StrEnum):
    """What happens to a step's inputs before its backward."""

    unchanged = "unchanged"
    overwritten = "overwritten"


Solver = Annotated[str, typer.Option(help="How to search for the plan.")]
DeviceName = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, or a device to plan for without having it, as A100-80GB."),
]
OptimizerName = Annotated[str | None, typer.Option(help="An optimizer whose state to count, as adamw.")]
AttentionName = Annotated[
    Attention | None,
    typer.Option(help="Planning for a GPU without one: its attention kernel, if not PyTorch's choice."),
]
CostName = Annotated[
    CostSource,
    typer.Option(help="Seconds of operations: by the device's figures, or timed on the device at hand."),
]
Accumulate = Annotated[
    bool | None,
    typer.Option("--accumulate", help="Gradients are there when the step begins, and are added to."),
]
InputsName = Annotated[
    Inputs,
    typer.Option(
        "--inputs",
        help="Whether inputs, buffers or biases are overwritten before the backward: it then reads copies.",
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
