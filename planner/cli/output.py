"""What the command line writes: results on stdout, errors on stderr, and exit codes."""

import contextlib
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console, RenderableType

from planner.cli.builder import BuilderError
from planner.errors import InfeasibleBudget, PlannerError, printable
from planner.report.text import Visible
from planner.user_plan import Plan

VERIFY_FAILED, WRONG_INPUT, INFEASIBLE = 1, 2, 3


@contextlib.contextmanager
def one_line_errors(debug: bool, as_json: bool = False) -> Iterator[None]:
    """Errors end the command with a line on stderr and the exit code that they stand for."""
    try:
        with contextlib.nullcontext() if debug else _without_torch_tracebacks():
            yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            say(traceback.format_exc(), err=True)
        _print_error(error, debug)
        if as_json and isinstance(error, InfeasibleBudget):
            least = {"minimum_bytes": error.minimum_bytes, "budget_bytes": error.budget_bytes}
            print_json({"error": "infeasible", **least})
        raise typer.Exit(INFEASIBLE if isinstance(error, InfeasibleBudget) else WRONG_INPUT) from None


@contextlib.contextmanager
def _without_torch_tracebacks() -> Iterator[None]:
    # torch logs, or warns of, errors that it then raises, with tracebacks.
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Error detected in")
            yield
    finally:
        logging.disable(disabled)


def _print_error(error: Exception, debug: bool) -> None:
    text = " ".join(str(error).split())
    if not isinstance(error, PlannerError | ValueError):
        text = f"{type(error).__name__}: {text}"
    if not debug and (isinstance(error, BuilderError) or not isinstance(error, PlannerError)):
        text += "; --debug shows where"
    say(f"error: {text}", err=True)


def stdout_for_results() -> contextlib.AbstractContextManager[object]:
    """A model may print while it is built or run; on stdout that would spoil --json."""
    return contextlib.redirect_stdout(sys.stderr)


def described(plan: Plan) -> dict[str, Any]:
    """A plan without its operations and timelines, as plain data."""
    return {
        **plan.model_dump(mode="json", exclude={"graphs", "timeline", "baseline_timeline"}),
        **_on_the_device(plan),
        "overhead": plan.overhead,
        "recomputed_ops": plan.recomputed_operations,
        "forward_ops": plan.forward_operations,
    }


def _on_the_device(plan: Plan) -> dict[str, Any]:
    """The sums of the whole step: what is reserved, and all that the device must have."""
    whole = plan.whole_step
    if whole is None:
        return {}
    return {
        "reserved_bytes": whole.reserved_bytes,
        "unarranged_reserved_bytes": whole.unarranged_reserved_bytes,
        "expandable_reserved_bytes": whole.expandable_reserved_bytes,
        "total_bytes": whole.total_bytes,
    }


def print_json(value: object) -> None:
    """The result for machines."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _console() -> Console:
    return Console(file=sys.stdout, soft_wrap=False, width=None if sys.stdout.isatty() else 100)


def width() -> int:
    """Columns that a report may have."""
    return min(_console().width, 120)


def show(what: RenderableType) -> None:
    """The result for people."""
    _console().print(Visible(what))


def say(text: str, *, err: bool = False) -> None:
    """A line of the result for people, or of an error; names in it are made visible."""
    typer.echo(printable(text.rstrip("\n"), keep="\n"), err=err)
