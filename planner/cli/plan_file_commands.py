"""Commands that read plan files, and need no model: `explain`, `report` and `diff`."""

import os
from typing import Annotated

import typer

from planner.cli.options import AsJson, Debug, PlanPath
from planner.cli.output import one_line_errors, print_json, say, show, width
from planner.planfile.atomic_file import check_writable
from planner.report.difference import difference, render_difference
from planner.report.explanation_text import render_explanation
from planner.user_plan import Plan


def explain_command(
    plan_path: PlanPath,
    module: Annotated[
        str,
        typer.Argument(
            metavar="[MODULE]",
            help="As named_modules() has it; the whole model if not given.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell why a plan treats a module as it does: what is kept and re-run, and what else would take."""
    with one_line_errors(debug):
        found = Plan.load(plan_path).explain(module)
        if as_json:
            print_json(found.to_dict())
        else:
            show(render_explanation(found, width=width()))


def report_command(
    plan_path: PlanPath,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")
    ] = "report.html",
    frontier: Annotated[
        list[str] | None,
        typer.Option(metavar="PLAN", help="A plan of a sweep, to show what other budgets cost (repeatable)."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a plan as one HTML page that opens offline: timeline, modules, operations, and why."""
    with one_line_errors(debug):
        check_writable(output)
        plan = Plan.load(plan_path)
        plan.report(output, frontier=[Plan.load(path) for path in frontier or ()])
        say(f"written to {output}")


def diff_command(
    first: PlanPath,
    second: Annotated[str, typer.Argument(metavar="PLAN", help="Another plan file.", show_default=False)],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show two plans side by side: what they promise, and which modules they treat differently."""
    with one_line_errors(debug):
        plans = Plan.load(first), Plan.load(second)
        if as_json:
            print_json(difference(*plans))
        else:
            show(render_difference(*plans, names_of(first, second), width=width()))


def names_of(first: str, second: str) -> tuple[str, str]:
    """The names to show for two files: their names, or their whole paths if these are the same."""
    names = os.path.basename(first), os.path.basename(second)
    return names if names[0] != names[1] else (first, second)
