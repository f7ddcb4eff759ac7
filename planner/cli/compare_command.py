"""The command `compare`."""

from typing import Annotated

import typer

import planner
from planner.cli.builder import build
from planner.cli.options import AsJson, Budget, Debug, Reference, StepOptions, with_step_options
from planner.cli.output import one_line_errors, print_json, show, stdout_for_results, width
from planner.cli.progress import shown_progress
from planner.estimation.comparison_table import render_comparison
from planner.planfile.budget import parse_budget


@with_step_options
def compare_command(
    reference: Reference,
    budget: Budget,
    solver: Annotated[
        list[str] | None, typer.Option(help="A solver of the planner (repeatable); auto if not given.")
    ] = None,
    block: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A module, or pattern, that torch.utils.checkpoint is put around (repeatable); each element "
            "of the outermost lists of modules if not given.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run each way and measure it; torch.compile's as well.")
    ] = False,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for each solver.")] = 60.0,
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    step: StepOptions,
) -> None:
    """Compare solvers with checkpoints as PyTorch and Hugging Face place them."""
    with one_line_errors(debug, as_json):
        parse_budget(budget, 2**40)
        with stdout_for_results(), shown_progress() as progress:
            built = build(reference, progress)
            found = planner.compare(
                built.model,
                args=built.args,
                kwargs=built.kwargs,
                budget=budget,
                solvers=solver or ("auto",),
                blocks=block or (),
                measure=measure,
                time_limit=time_limit,
                progress=progress,
                **step.keywords(),
            )
        if as_json:
            print_json(found.to_dict())
        else:
            show(render_comparison(found, width=width()))
