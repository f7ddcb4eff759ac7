"""The public functions plan, prepare and sweep."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from planner.errors import BudgetError, CaptureError, warn
from planner.planfile.budget import Budget, parse_budget
from planner.planning import prepare as captured
from planner.planning.make_plan import make_plan
from planner.planning.options import (
    CaptureKeywords,
    PlanKeywords,
    SplitKeywords,
    check_options,
    read_options,
    shows_options,
)
from planner.planning.solve import find_solver, infeasible, least_whole_step, plan_prepared, swept_in_pieces
from planner.planning.solve_many import solve_many
from planner.prepared_step import PreparedStep
from planner.problem.selection import select
from planner.progress import Progress, no_report
from planner.training_step.inputs import Inputs, read_step
from planner.user_plan import Plan
from solvers import portfolio
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.schedule import simulate


@shows_options(PlanKeywords)
def plan(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan a training step within a memory budget. Nothing of the module's is changed or run.

    Args:
        model: Any module.
        args, kwargs: Example inputs; the plan is for their shapes. ``args`` is a tuple or list of positional
            arguments, a tensor that is the only one, a mapping of keyword arguments (a batch of Hugging
            Face's is one), or a DataLoader, of which the first batch is taken.
        budget: Most bytes for the whole step, the optimizer's included: an int, "8GiB", "60%" of the
            unplanned step, "min" for the least that can be reached at any price, or "min@33%" for the
            least at no more than 33 % extra time. On a GPU it bounds what the device must have: allocated
            bytes, what the caching allocator reserves beyond these, libraries and the context
            (``plan.whole_step`` tells them apart); a percentage bounds the allocated bytes alone.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Returns:
        The plan; ``plan.apply(model)`` installs it, ``plan.save(path)`` writes it.

    Raises:
        BudgetError: If the budget cannot be read, or "min@33%" allows less time than any schedule takes.
        InputError: If model, inputs, loss or an option are none of these forms; it says what to write.
        OutputsError: If ``outputs`` is neither of the two.
        CaptureError: If the step cannot be captured.
        InputsError: If ``inputs`` is neither of the two.
        SelectionError: If ``keep``, ``recompute`` or ``checkpoints`` name what is not there.
        InfeasibleBudget: If no schedule fits; ``.minimum_bytes`` is the least budget that would,
            and what "min" takes.
    """
    return plan_in_place(model, args, kwargs, None, budget=budget, progress=progress, **options)


def plan_in_place(
    model: torch.nn.Module,
    args: Inputs,
    kwargs: Mapping[str, Any] | None,
    as_run: Callable[[torch.nn.Module], object] | None,
    *,
    budget: int | str,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan a step in the place of the one that the user runs: percentages are of that.

    Args:
        as_run: Makes a copy of the module run as the user's does, with its own checkpoints; None where the
            module is as it is run.
        model, args, kwargs, budget, progress, **options: As for :func:`plan`.
    """
    check_options(progress=progress)
    wanted = read_options("plan", PlanKeywords, options)
    report = progress or no_report
    find_solver(wanted.solver)
    parse_budget(budget, 2**60)  # bad text is an error before the long work, not after
    step = read_step(model, args, kwargs, wanted.loss, wanted.outputs, of="plan")
    prepared = captured.prepare(
        model,
        replace(step, training=wanted.training),
        wanted,
        progress=lambda text, fraction: report(text, 0.7 * fraction),
    )
    if as_run is not None:
        report("recording the step with its own checkpoints", 0.7)
        try:
            prepared = replace(prepared, as_run_bytes=prepared.changed(as_run)[1].allocated_bytes)
        except CaptureError as error:
            warn(
                f"what the step takes with its own checkpoints is not known ({error}): percentages are of "
                "the step without them. Pass the budget in bytes, as in '8GiB'"
            )
    made = plan_prepared(prepared, budget, progress=lambda text, fraction: report(text, 0.7 + 0.3 * fraction))
    return Plan.of(made)


@shows_options(CaptureKeywords)
def prepare(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[CaptureKeywords],
) -> PreparedStep:
    """Capture a training step once, to plan it for several budgets, solvers or selections.

    Capturing takes most of the time that :func:`plan` takes; ``planner.prepare(model, x).plan(budget="60%")``
    is ``planner.plan(model, x, budget="60%")``, and a second ``plan`` of the same step only searches.

    Args:
        model, args, kwargs, progress: As for :func:`plan`.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Errors are those of :func:`plan`.

    Returns:
        The step. It holds the model, and a copy of it without data.
    """
    check_options(progress=progress)
    wanted = read_options("prepare", CaptureKeywords, options)
    step = read_step(model, args, kwargs, wanted.loss, wanted.outputs, of="prepare")
    return PreparedStep(
        captured.prepare(
            model, replace(step, training=wanted.training), wanted, progress=progress or no_report
        )
    )


@shows_options(SplitKeywords)
def sweep(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budgets: Sequence[int | str] | int | str | None = None,
    points: int = 20,
    time_limit: float = 300,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Unpack[SplitKeywords],
) -> list[Plan]:
    """Plan for many budgets at once: what memory costs in time.

    The step is captured once and solvers share their work. Of two plans the one with the larger
    budget is never slower.

    Args:
        budgets: One or several, as for :func:`plan`; None for ``points`` budgets, evenly spaced from the
            step that recomputes nothing to the least peak that can be reached.
        time_limit: Wall seconds for all budgets together.
        **options: See :class:`planner.planning.options.PlanOptions`.

    All other arguments and errors are those of :func:`plan`; budgets that cannot be met are left out
    unless all are.

    Returns:
        The plans, largest budget first.
    """
    check_options(points=points, progress=progress)
    given = read_options(
        "sweep", SplitKeywords, options, time_limit=time_limit, keep=keep, recompute=recompute
    )
    report = progress or no_report
    named: list[Any] | None = None
    if budgets is not None:
        one = isinstance(budgets, str) or not isinstance(budgets, Iterable)
        named = [budgets] if one else list(budgets)  # type: ignore[arg-type]
    for budget in named or ():
        parse_budget(budget, 2**60)
    if named == []:
        raise BudgetError("sweep needs a budget: leave budgets= out for points=20 of them, or name some")
    step = read_step(model, args, kwargs, given.loss, given.outputs, of="sweep")
    prepared = captured.prepare(
        model,
        replace(step, training=given.training),
        given,
        progress=lambda text, fraction: report(text, 0.4 * fraction),
    )
    graph = prepared.problem.graph

    def insisted(graph: Graph) -> Constraints:
        return select(graph, keep=keep, recompute=recompute, modules=dict(model.named_modules()))

    wanted = [prepared.budget(b) for b in named or ()]
    if given.split != "none":
        made = swept_in_pieces(prepared, wanted, points, lambda text, share: report(text, 0.4 + 0.6 * share))
        return sorted(map(Plan.of, made), key=lambda p: -(p.target.budget_bytes or p.predicted.peak_bytes))
    end = time.perf_counter() + time_limit
    known = []
    if named is None:
        least = portfolio.solve(
            graph, None, time_limit=time_limit / 4, constraints=insisted(graph), effort=given.effort
        )
        known = [least.schedule]
        most = simulate(graph, graph.base_schedule).peak_bytes
        steps = [most - (most - least.peak_bytes) * i // max(points - 1, 1) for i in range(points)]
        least_total = least_whole_step(prepared).total_bytes
        totals = (prepared.footprint.around(prepared.resident.total + x) for x in dict.fromkeys(steps))
        wanted = [
            Budget(b, str(b), relative=True) for b in dict.fromkeys(max(t, least_total) for t in totals)
        ]
    solutions = solve_many(
        prepared,
        wanted,
        constraints=insisted,
        known=known,
        time_limit=max(0.0, end - time.perf_counter()),
        progress=lambda text, fraction: report(text, 0.4 + 0.58 * fraction),
    )
    plans = [
        Plan.of(make_plan(prepared, solved, budget))
        for solved, budget in zip(solutions, wanted, strict=True)
        if solved.solution.feasible
    ]
    if not plans and solutions:
        first = solutions[0]
        raise infeasible(replace(prepared, problem=first.problem), first.solution, wanted[0])
    report("planned", 1.0)
    return sorted(plans, key=lambda p: -(p.target.budget_bytes or p.predicted.peak_bytes))
