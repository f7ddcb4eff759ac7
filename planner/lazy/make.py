"""Getting a plan for a step: read from a file, or made and written to it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from planner import api
from planner.capture.writes_through_views import WRITES
from planner.errors import PlanFileError
from planner.lazy.cached import made_of, mismatch
from planner.planfile.atomic_file import check_writable
from planner.planfile.budget import format_bytes, parse_budget
from planner.planfile.plan import PlanRecord
from planner.planning.backends import check_backend
from planner.planning.options import OptionError, PlanKeywords, PlanOptions, check_options, read_options
from planner.planning.solve import find_solver
from planner.progress import Progress
from planner.runtime.shapes.policy import OnNewShape
from planner.training_step.inputs import check_loss
from planner.training_step.step import Step


@dataclass(frozen=True)
class Wanted:
    """The options of a plan that is yet to be made.

    Attributes:
        budget: See :func:`planner.plan`.
        on_new_shape: See :meth:`Plan.apply`.
        cache: The file that keeps the plan, or None.
        given: Options of :func:`planner.plan`, by name.
        progress: See :func:`planner.plan`.
        enlarge: Given the arguments of the first training call, returns those to plan for; None: the same.
        as_run: Given the module or a copy, switches on the module's own checkpoints, which were switched off
            for the plan; None: there were none.
    """

    budget: int | str
    on_new_shape: OnNewShape
    cache: str | os.PathLike[str] | None = None
    given: PlanKeywords = field(default_factory=PlanKeywords)
    progress: Progress | None = None
    enlarge: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    as_run: Callable[[torch.nn.Module], object] | None = None

    @property
    def options(self) -> PlanOptions:
        """All options: as given, or else the defaults of :func:`planner.plan`."""
        return PlanOptions(**self.given)


@dataclass(frozen=True)
class Made:
    """A plan and where it is from.

    Attributes:
        plan: The plan.
        how: The beginning of the line that reports it.
        end: Its end.
    """

    plan: PlanRecord
    how: str
    end: str = ""

    def line(self) -> str:
        """One line about the plan that was made."""
        plan = self.plan
        whole, unplanned = plan.whole_step, plan.baseline_whole_step
        now = plan.predicted.peak_bytes if whole is None else whole.total_bytes
        before = plan.baseline.peak_bytes if unplanned is None else unplanned.total_bytes
        extra = plan.overhead
        if any(WRITES in note for note in plan.notes):  # it takes longer even if it recomputes nothing
            extra = plan.predicted.seconds / plan.baseline.seconds - 1
        return (
            f"{self.how}: {format_bytes(before)} -> {format_bytes(now)}, {100 * extra:+.0f} % time{self.end}"
        )


def checked_wanted(wanted: Wanted) -> Wanted:
    """Check the options that need neither the model nor its inputs.

    Raises:
        PlannerError: As :func:`planner.plan`.
    """
    parse_budget(wanted.budget, 2**60)
    check_options(progress=wanted.progress)
    options = read_options("auto_checkpoint", PlanKeywords, wanted.given)
    find_solver(options.solver)
    check_backend(options)
    check_loss(options.loss)
    if not isinstance(options.training, bool):
        raise OptionError(f"training={options.training!r}: expected True or False")
    if wanted.cache is not None and not os.path.isfile(wanted.cache):  # a file that exists may be read only
        check_writable(wanted.cache)
    return wanted


def planned_or_cached(model: torch.nn.Module, step: Step, wanted: Wanted) -> Made:
    """The plan of a step: the one in the file if it matches, else a new one, which is written to the file.

    Where the file cannot be written by then, the plan is used all the same, and its line says so.

    Raises:
        PlannerError: As :func:`planner.plan`.
    """
    step = replace(step, training=wanted.options.training)
    name, cache = type(model).__name__, wanted.cache
    why = ""
    if cache is not None and os.path.exists(cache):
        try:
            plan = PlanRecord.load(cache)
            then, now = plan.created_with.get("own_checkpoints", "off"), _on_or_off(wanted)
            if then != now:  # said first: with them settings of the model change too, as use_cache
                why = f"the model's own checkpoints were {then}, now {now}"
            else:
                why = mismatch(plan, model, step, wanted.budget, wanted.given)
        except PlanFileError as error:
            why = f"could not be read: {f'{error}'.removeprefix(f'{os.fspath(cache)}: ')}"
        else:
            if not why:
                how = f"{name} trains by {os.fspath(cache)} for {plan.target.budget_text}"
                return Made(plan.remember(wanted.options), how)
            why = f"was for another step: {why}"
    started = time.perf_counter()
    given, progress = (model, step.args, step.kwargs, wanted.as_run), wanted.progress
    plan = api.plan_in_place(*given, budget=wanted.budget, progress=progress, **wanted.given)
    seconds = time.perf_counter() - started
    end = ""
    if cache is not None:
        made = made_of(model, wanted.given, step)
        noted = {**plan.created_with, **made, "own_checkpoints": _on_or_off(wanted)}
        plan = plan.model_copy(update={"created_with": noted}).remember(wanted.options)
        end = f"; {os.fspath(cache)}" + (f", which {why}" if why else "")
        try:
            plan.save(cache)
        except PlanFileError as error:  # a full disk, say: the plan is there all the same
            end = f"; {error}: it will be planned again"
    return Made(plan, f"{name} planned for {plan.target.budget_text} in {seconds:.0f} s", end)


def _on_or_off(wanted: Wanted) -> str:
    """Whether the plan replaces checkpoints of the model's own."""
    return "off" if wanted.as_run is None else "on"
