"""The command line: `plan`, `sweep`, `max-batch`, `estimate`, `verify`, and what reads plan files.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 a plan did not verify, 2 wrong
usage or input, 3 no plan fits the budget, 130 interrupted. A reader of stdout that stops early, as `head`
does, changes none of them.
"""

import glob
import json
import os
from typing import Annotated, Any

import typer

import planner
from planner.cli.builder import BuilderError, Built, build, build_for_batches, load_reference
from planner.cli.calibrate_command import calibrate_command
from planner.cli.compare_command import compare_command
from planner.cli.memory import replay_command, snapshot_command
from planner.cli.options import (
    Again,
    AsJson,
    BackendName,
    Budget,
    Checkpoints,
    Debug,
    FigurePath,
    Keep,
    Loss,
    MeasuredOutputs,
    PlanFile,
    PlanPath,
    Reference,
    Solver,
    SplitName,
    StepOptions,
    with_step_options,
)
from planner.cli.output import (
    VERIFY_FAILED,
    described,
    one_line_errors,
    print_json,
    say,
    show,
    stdout_for_results,
    width,
)
from planner.cli.plan_file_commands import diff_command, explain_command, report_command
from planner.cli.progress import shown_progress
from planner.errors import BudgetError
from planner.estimation.table import render_estimate
from planner.planfile.atomic_file import check_folder, check_writable, write_atomically
from planner.planfile.budget import parse_budget
from planner.planfile.plan import plan_schema
from planner.report import figure as plan_figure
from planner.report.batches import render_batches
from planner.report.frontier import render_frontier
from planner.report.text import render
from planner.report.verification import render_verification
from planner.user_plan import Plan

app = typer.Typer(
    help="Plan which activations a PyTorch training step keeps and recomputes, within a memory budget.",
    epilog="Exit codes: 0 done, 1 the plan did not verify, 2 wrong usage or input, 3 no plan fits the "
    "budget, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        say(planner.__version__)
        raise typer.Exit


@app.command("plan")
@with_step_options
def plan_command(
    reference: Reference,
    budget: Budget,
    output: PlanFile = None,
    solver: Solver = "auto",
    keep: Keep = None,
    recompute: Again = None,
    checkpoint: Checkpoints = None,
    backend: BackendName = "auto",
    split: SplitName = "none",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds that the search may take.")] = 60.0,
    figure: FigurePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    step: StepOptions,
) -> None:
    """Plan a model's training step for a memory budget."""
    with one_line_errors(debug, as_json):
        # What can be refused at once is refused before the model is built.
        parse_budget(budget, 2**40)
        if output is not None:
            check_writable(output)
        if figure is not None:
            plan_figure.check_figure(figure)
        with stdout_for_results(), shown_progress() as progress:
            built = build(reference, progress)
            plan = planner.plan(
                built.model,
                args=built.args,
                kwargs=built.kwargs,
                budget=budget,
                solver=solver,
                time_limit=time_limit,
                keep=keep or (),
                recompute=recompute or (),
                checkpoints=checkpoint or (),
                backend=backend,
                split=split,
                progress=progress,
                **step.keywords(),
            )
        if output is not None:
            plan.save(output)
        if figure is not None:
            plan_figure.save(plan, figure)
        if as_json:
            print_json({**described(plan), "saved_to": output})
            return
        show(render(plan, width=width()))
        if output is not None:
            say(f"\nwritten to {output}")


@app.command("sweep")
@with_step_options
def sweep_command(
    reference: Reference,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", help="As 90%,60%,min; from no recomputation to the least if not given."),
    ] = None,
    points: Annotated[int, typer.Option(min=2, help="How many budgets, where none are given.")] = 20,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write the plans to this folder.")
    ] = None,
    keep: Keep = None,
    recompute: Again = None,
    split: SplitName = "none",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for all budgets.")] = 300.0,
    figure: FigurePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    step: StepOptions,
) -> None:
    """Plan for many budgets at once: what memory costs in time."""
    with one_line_errors(debug, as_json):
        wanted = None if budgets is None else [b.strip() for b in budgets.split(",")]
        for budget in wanted or ():
            parse_budget(budget, 2**40)
        if output is not None:
            check_folder(output)
        if figure is not None:
            plan_figure.check_figure(figure)
        with stdout_for_results(), shown_progress() as progress:
            built = build(reference, progress)
            plans = planner.sweep(
                built.model,
                args=built.args,
                kwargs=built.kwargs,
                budgets=wanted,
                points=points,
                time_limit=time_limit,
                keep=keep or (),
                recompute=recompute or (),
                split=split,
                progress=progress,
                **step.keywords(),
            )
        saved = [os.path.join(output, f"plan-{i:02}.json") if output else None for i in range(len(plans))]
        for made, path in zip(plans, saved, strict=True):
            if path is not None:
                made.save(path)
        if output is not None:
            _tell_of_others(output, len(plans))
        if figure is not None:
            plan_figure.save_frontier(plans, figure)
        if as_json:
            print_json([{**described(p), "saved_to": s} for p, s in zip(plans, saved, strict=True)])
            return
        show(render_frontier(plans, width=width()))
        if output is not None:
            say(f"\n{len(plans)} plans written to {output}")


def _tell_of_others(folder: str, count: int) -> None:
    """Say that a folder has plans beside those that a sweep wrote."""
    there = glob.glob("plan-*.json", root_dir=folder)
    if others := sorted({*there}.difference(f"plan-{i:02}.json" for i in range(count))):
        text = f"{folder} has plans of other runs too ({len(others)}), as {others[0]}"
        say(f"note: {text}: remove them, or write to an empty folder", err=True)


@app.command("max-batch")
@with_step_options
def max_batch_command(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns (model, make_args), where make_args(batch) makes the arguments of a batch.",
            show_default=False,
        ),
    ],
    budget: Annotated[str, typer.Option("--budget", "-b", help="8GiB, 8GB, or bytes.")],
    max_overhead: Annotated[
        str,
        typer.Option(help="The most extra time per sample over the largest unplanned batch, as 29%, or any."),
    ] = "33%",
    output: PlanFile = None,
    solver: Solver = "auto",
    start: Annotated[int, typer.Option(min=1, help="The first batch that is captured.")] = 4,
    most: Annotated[int, typer.Option(min=1, help="No larger batch is tried.")] = 1 << 20,
    split: SplitName = "none",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for each captured answer.")] = 60.0,
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    step: StepOptions,
) -> None:
    """Find the largest batch that fits a budget, with its plan, and what else there is to choose from."""
    with one_line_errors(debug, as_json):
        parse_budget(budget, 2**40)
        allowed = None if max_overhead == "any" else _share(max_overhead)
        if output is not None:
            check_writable(output)
        with stdout_for_results(), shown_progress() as progress:
            model, make_args = build_for_batches(reference, progress)
            found = planner.max_batch(
                model,
                make_args,
                budget,
                max_overhead=allowed,
                solver=solver,
                start=start,
                most=most,
                split=split,
                time_limit=time_limit,
                progress=progress,
                **step.keywords(),
            )
        if output is not None:
            found.plan.save(output)
        if as_json:
            plan = described(found.plan)
            print_json({**found.to_dict(), "plan": plan, "saved_to": output})
            return
        show(render_batches(found, width=width()))
        if output is not None:
            say(f"\nthe plan for batch {found.batch} is written to {output}")


@app.command("estimate")
@with_step_options
def estimate_command(
    reference: Reference,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Put torch.utils.checkpoint around this module (repeatable)."),
    ] = None,
    suggest: Annotated[
        int, typer.Option(min=0, help="Suggest so many modules to checkpoint, and estimate those.")
    ] = 0,
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    step: StepOptions,
) -> None:
    """The memory of a step as it is, module by module, and with checkpoints placed by hand."""
    with one_line_errors(debug, as_json):
        if checkpoint and suggest:
            from planner.planning.options import OptionError  # which imports PyTorch

            raise OptionError(
                "--checkpoint and --suggest both say where the checkpoints are: give one of them"
            )
        with stdout_for_results(), shown_progress() as progress:
            built = build(reference, progress)
            inputs: dict[str, Any] = {"args": built.args, "kwargs": built.kwargs, "progress": progress}
            inputs |= step.keywords()
            if suggest:
                from planner.estimation.suggest import estimate_suggested  # which imports PyTorch

                made = estimate_suggested(built.model, k=suggest, **inputs)
                checkpoint = list(made.checkpointed.modules) if made.checkpointed else []
            else:
                made = planner.estimate(built.model, checkpoints=checkpoint or (), **inputs)
        if as_json:
            print_json(made.to_dict())
            return
        show(render_estimate(made, width=width()))
        if suggest:
            names = ", ".join(checkpoint or ()) or "none: no module's checkpoint lowers the peak"
            say(f"\nsuggested: {names}")


def _share(text: str) -> float:
    try:
        share = float(text.rstrip("% ")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6:
        raise BudgetError(f'--max-overhead {text!r} is no share of time: expected "29%", 0.29 or "any"')
    return share


@app.command("verify")
def verify_command(
    reference: Reference,
    plan_path: PlanPath,
    loss: Loss = None,
    outputs: MeasuredOutputs = None,
    repeats: Annotated[
        int, typer.Option(min=0, help="Timed steps of each kind; the spread of their times is shown.")
    ] = 3,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run the planned and the unplanned step, and compare gradients, buffers, memory and time."""
    with one_line_errors(debug):
        if ":" in plan_path and os.path.isfile(reference):
            raise BuilderError(f"the model comes before the plan: planner verify {plan_path} {reference}")
        plan = Plan.load(plan_path)
        with stdout_for_results(), shown_progress() as progress:
            built: Built = build(reference, progress)
            if built.model.training is not plan.model.training:  # parts of it may be in another mode
                built.model.train(plan.model.training)
            report = planner.verify(
                built.model,
                args=built.args,
                kwargs=built.kwargs,
                plan=plan,
                loss=None if loss is None else load_reference(loss),
                outputs=outputs,
                repeats=repeats,
                progress=progress,
            )
        if as_json:
            print_json(report.to_dict())
        else:
            show(render_verification(report, width=width()))
        if not report.ok:
            raise typer.Exit(VERIFY_FAILED)


@app.command("show")
def show_command(
    plan_path: PlanPath,
    figure: FigurePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a plan keeps and recomputes, by module, and its memory over the step."""
    with one_line_errors(debug):
        plan = Plan.load(plan_path)
        if figure is not None:
            plan_figure.check_figure(figure)
            plan_figure.save(plan, figure)
        if as_json:
            print_json(described(plan))
        else:
            show(render(plan, width=width()))


app.command("explain")(explain_command)
app.command("report")(report_command)
app.command("diff")(diff_command)
app.command("compare")(compare_command)
app.command("calibrate")(calibrate_command)
app.command("snapshot")(snapshot_command)
app.command("replay")(replay_command)


@app.command("schema")
def schema_command(
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of plan files."""
    with one_line_errors(debug):
        text = json.dumps(plan_schema(), indent=2) + "\n"
        if output is None:
            say(text)
        else:
            write_atomically(output, text)
