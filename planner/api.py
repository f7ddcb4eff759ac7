"""The public functions: plan, sweep, auto_checkpoint."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from planner._torch.cuda.attention import Attention
from planner.costs.devices import Device
from planner.costs.optimizer_step import Optimizer
from planner.errors import BudgetError
from planner.graph.overwritten import InputsAre, checked_inputs
from planner.planfile.budget import Budget, parse_budget
from planner.planfile.plan import Plan
from planner.planning.make_plan import make_plan
from planner.planning.option_checks import check_options
from planner.planning.prepare import CostSource, prepare
from planner.planning.solve import (
    Progress,
    find_solver,
    infeasible,
    least_whole_step,
    no_report,
    plan_prepared,
    room_bytes,
)
from planner.planning.solve_for import solve_for
from planner.problem.selection import select
from planner.runtime.install import apply
from planner.runtime.shape_policy import OnNewShape, checked
from planner.training_step.inputs import Inputs, read_step
from planner.training_step.step import Loss, Outputs
from solvers import portfolio
from solvers.model.schedule import simulate


def plan(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    solver: str = "auto",
    loss: Loss | None = None,
    outputs: Outputs = "held",
    optimizer: Optimizer | None = None,
    device: str | torch.device | Device | None = None,
    attention: Attention | None = None,
    accumulate: bool | None = None,
    costs: CostSource = "roofline",
    training: bool = True,
    inputs: InputsAre = "unchanged",
    time_limit: float = 60,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    progress: Progress | None = None,
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
            bytes, a reserve for fragmentation, libraries and the context (``plan.whole_step`` tells them
            apart).
        solver: A name in ``solvers.SOLVERS``, or "auto" for the best that fits.
        loss: Makes the scalar loss of the module's output, where the module does not return it
            (itself, or as ``output.loss``). Without either, the step differentiates all outputs.
        outputs: Whether the training loop still has the module's outputs while backward runs: "held", as
            in ``out = model(x); out.loss.backward()``, or "dropped", as in ``model(x).loss.backward()`` and
            in trainers, which hand on the loss alone. Dropped outputs are not counted.
        optimizer: An instance, class or name; its state counts as resident, and its step must fit.
        device: Where the step will run: None for where the model is, or the name of a device.
        attention: Planning for a GPU without one: the kernel of scaled dot product attention, "cudnn",
            "flash", "efficient" or "math"; None for what PyTorch would choose there.
        accumulate: Whether gradients are there already when the step begins and are added to, as with
            several micro-batches a step; None: as the parameters' are now.
        costs: Where the seconds of operations come from: "roofline", from the device's figures, or
            "measured", which times each distinct one on the device at hand and remembers it.
        training: Whether the module will train in training mode, in which it is planned whatever mode it is
            in now; False for evaluation mode (dropout off, running statistics as they are).
        inputs: What happens to inputs, buffers and biases between forward and backward: "unchanged", then
            the backward may read them again, or "overwritten", then it reads copies, whose bytes count.
        time_limit: Wall seconds for the solver.
        keep: Never recompute what matches: module paths ("encoder.layer.0"), operators
            ("aten.native_layer_norm") or patterns of either ("encoder.layer.*.attention").
        recompute: Never keep what matches.
        checkpoints: Keep the results of these modules and recompute all else, if nothing else is
            said by ``solver="manual"``: checkpointing by hand.
        progress: Called with a text and a fraction from 0 to 1.

    Returns:
        The plan; ``plan.apply(model)`` installs it, ``plan.save(path)`` writes it.

    Raises:
        BudgetError: If the budget cannot be read.
        InputError: If model, inputs, loss or an option are none of these forms; it says what to write.
        OutputsError: If ``outputs`` is neither of the two.
        CaptureError: If the step cannot be captured.
        InputsError: If ``inputs`` is neither of the two.
        SelectionError: If ``keep``, ``recompute`` or ``checkpoints`` name what is not there.
        InfeasibleBudget: If no schedule fits; ``.minimum_bytes`` is the least budget that would,
            and what "min" takes.
    """
    check_options(
        attention=attention,
        accumulate=accumulate,
        time_limit=time_limit,
        keep=keep,
        recompute=recompute,
        checkpoints=checkpoints,
        progress=progress,
    )
    report = progress or no_report
    find_solver(solver)
    checked_inputs(inputs)
    parse_budget(budget, 2**60)  # bad text is an error before the long work, not after
    step = replace(read_step(model, args, kwargs, loss, outputs, of="plan"), training=training)
    prepared = prepare(
        model,
        step,
        optimizer=optimizer,
        device=device,
        attention=attention,
        accumulate=accumulate,
        costs=costs,
        inputs=inputs,
        progress=lambda text, fraction: report(text, 0.7 * fraction),
    )
    return plan_prepared(
        prepared,
        budget,
        replace(
            prepared.options,
            solver=solver,
            time_limit=time_limit,
            keep=keep,
            recompute=recompute,
            checkpoints=checkpoints,
        ),
        progress=lambda text, fraction: report(text, 0.7 + 0.3 * fraction),
    )


def sweep(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budgets: Sequence[int | str] | int | str | None = None,
    points: int = 20,
    loss: Loss | None = None,
    outputs: Outputs = "held",
    optimizer: Optimizer | None = None,
    device: str | torch.device | Device | None = None,
    attention: Attention | None = None,
    accumulate: bool | None = None,
    costs: CostSource = "roofline",
    training: bool = True,
    inputs: InputsAre = "unchanged",
    time_limit: float = 300,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Plan]:
    """Plan for many budgets at once: what memory costs in time.

    The step is captured once and solvers share their work. Of two plans the one with the larger
    budget is never slower.

    Args:
        budgets: One or several, as for :func:`plan`; None for ``points`` budgets, evenly spaced from the
            step that recomputes nothing to the least peak that can be reached.
        time_limit: Wall seconds for all budgets together.

    All other arguments and errors are those of :func:`plan`; budgets that cannot be met are left out
    unless all are.

    Returns:
        The plans, largest budget first.
    """
    check_options(
        points=points,
        attention=attention,
        accumulate=accumulate,
        time_limit=time_limit,
        keep=keep,
        recompute=recompute,
        progress=progress,
    )
    report = progress or no_report
    if isinstance(budgets, str | int | float):
        budgets = [budgets]
    for budget in budgets or ():
        parse_budget(budget, 2**60)
    if budgets is not None and not len(budgets):
        raise BudgetError("sweep needs a budget: leave budgets= out for points=20 of them, or name some")
    step = replace(read_step(model, args, kwargs, loss, outputs, of="sweep"), training=training)
    prepared = prepare(
        model,
        step,
        optimizer=optimizer,
        device=device,
        attention=attention,
        accumulate=accumulate,
        costs=costs,
        inputs=inputs,
        progress=lambda text, fraction: report(text, 0.4 * fraction),
    )
    graph = prepared.problem.graph
    constraints = select(graph, keep=keep, recompute=recompute, modules=dict(model.named_modules()))
    wanted = [prepared.budget(b) for b in budgets or ()]
    end = time.perf_counter() + time_limit
    known = []
    if budgets is None:
        least = portfolio.solve(graph, None, time_limit=time_limit / 4, constraints=constraints)
        known = [least.schedule]
        most = simulate(graph, graph.base_schedule).peak_bytes
        steps = [most - (most - least.peak_bytes) * i // max(points - 1, 1) for i in range(points)]
        least_total = least_whole_step(prepared).total_bytes
        totals = (prepared.footprint.around(prepared.resident.total + x) for x in dict.fromkeys(steps))
        wanted = [Budget(b, str(b)) for b in dict.fromkeys(max(t, least_total) for t in totals)]
    rooms = [room_bytes(budget, prepared) for budget in wanted]
    shares = [budget for budget in wanted if budget.max_overhead is not None]
    answers = portfolio.sweep(
        graph,
        [room for room, budget in zip(rooms, wanted, strict=True) if budget.max_overhead is None],
        time_limit=max(0.0, end - time.perf_counter()) * (len(wanted) - len(shares)) / max(1, len(wanted)),
        progress=lambda text, fraction: report(text, 0.4 + 0.58 * fraction),
        constraints=constraints,
        known=known,
    )
    solved = iter(answers)
    each = max(0.0, end - time.perf_counter()) / max(1, len(shares))
    solutions = [
        next(solved)
        if budget.max_overhead is None
        else solve_for(graph, budget, None, portfolio.NAME, time_limit=each, constraints=constraints)
        for budget in wanted
    ]
    plans = [
        make_plan(prepared, solution, budget)
        for solution, budget in zip(solutions, wanted, strict=True)
        if solution.feasible
    ]
    if not plans and solutions:
        raise infeasible(prepared, solutions[0], wanted[0])
    report("planned", 1.0)
    return sorted(plans, key=lambda p: -(p.target.budget_bytes or p.predicted.peak_bytes))


def auto_checkpoint(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    on_new_shape: OnNewShape = "reapply",
    **options: Any,
) -> torch.nn.Module:
    """Plan and install in one call: ``plan(model, args, kwargs, budget=budget, ...).apply(model)``.

    Args:
        on_new_shape: What to do with inputs of other shapes, see :meth:`Plan.apply`.

    All other arguments and errors are those of :func:`plan`.

    Returns:
        The same module, training within the budget.
    """
    checked(on_new_shape)
    made = plan(model, args, kwargs, budget=budget, **options)
    return apply(made, model, on_new_shape=on_new_shape)
