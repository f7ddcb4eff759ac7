"""The public function ``auto_checkpoint``: plan and install, now or at the first training call."""

import os
from collections.abc import Mapping
from typing import Any, Unpack

import torch

from planner import api
from planner.environment import budget_of_environment, plans_are_off
from planner.errors import BudgetError
from planner.lazy.first_call import install_lazily
from planner.lazy.make import Wanted, checked_wanted, planned_or_cached
from planner.planfile.budget import parse_budget
from planner.planning.options import PlanKeywords, shows_options
from planner.progress import Progress
from planner.runtime.install import apply
from planner.runtime.shapes.policy import OnNewShape, checked
from planner.training_step.inputs import Inputs, check_model, read_step, refuse_without_shape, refuse_wrappers


@shows_options(PlanKeywords)
def auto_checkpoint(
    model: torch.nn.Module,
    args: Inputs = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    on_new_shape: OnNewShape | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> torch.nn.Module:
    """Make a module train within a memory budget.

    Without example inputs the module is planned at its first training call: the first one in training mode
    and with gradients on, before anything of it runs, with the shapes and the autocast that are there. Calls
    for evaluation before that run as they are. One line on standard error says what was planned. A loss that
    is computed outside of the module is not known then: its own memory is not counted unless ``loss=`` says
    how it is computed, and the line says so.

    With ``torch.distributed`` rank 0 plans and the others take its plan; an error is raised on every rank.

    With example inputs, it is ``plan(model, args, kwargs, budget=budget, ...).apply(model)``.

    Args:
        model: Any module.
        args, kwargs: Example inputs, see :func:`planner.plan`; left out to plan at the first training call.
        budget: See :func:`planner.plan`. Without example inputs the environment variable ``PLANNER_BUDGET``
            takes precedence over it, and it may be left out where that is set.
        on_new_shape: What to do with inputs of other shapes, see :meth:`Plan.apply`. If it is left out,
            "reapply" with example inputs; without them "replan", as the first batch need not be the largest.
        cache: A file for the plan: it is written there, and read instead of planning where it is for the same
            module with the same code and settings, inputs no smaller than these, other arguments, budget and
            options. Otherwise it is replaced.
        progress: See :func:`planner.plan`.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Without example inputs ``accumulate=None`` plans again when a step begins with gradients that are there,
    and ``on_new_shape="replan"`` when parameters have become larger, or train that were frozen.

    The environment variable ``PLANNER=0`` turns it off: the module is returned as it is.

    Raises:
        BudgetError: There is no budget.
        PlanFileError: ``cache`` cannot be written.

    All other errors are those of :func:`planner.plan`; without example inputs those that need the inputs are
    raised by the first training call. Where parameters have no shape yet, as those of ``nn.LazyLinear``, that
    call runs without a plan, and the next one is planned.

    Returns:
        The same module, training within the budget.
    """
    if args is None and kwargs is None:
        to_plan = wanted_lazily(
            model, budget=budget, on_new_shape=on_new_shape, cache=cache, progress=progress, **options
        )
        if to_plan is not None:
            install_lazily(model, to_plan)
        return model
    if budget is None:
        raise BudgetError(_NO_BUDGET)
    policy = checked(on_new_shape or "reapply")
    wanted = checked_wanted(Wanted(budget, policy, cache, options, progress))
    check_model(model)
    refuse_without_shape(model, "plan")
    refuse_wrappers(model, "plan")
    if plans_are_off():
        return model
    if cache is None:
        plan = api.plan(model, args, kwargs, budget=budget, progress=progress, **options)
        return apply(plan, model, on_new_shape=policy)
    step = read_step(model, args, kwargs, wanted.options.loss, wanted.options.outputs, of="auto_checkpoint")
    made = planned_or_cached(model, step, wanted)
    return apply(made.plan, model, on_new_shape=policy)


_NO_BUDGET = 'auto_checkpoint needs a budget, as in budget="8GiB"'


def wanted_lazily(
    model: torch.nn.Module,
    *,
    budget: int | str | None = None,
    on_new_shape: OnNewShape | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> Wanted | None:
    """The options of planning a module at its first training call; None where plans are off.

    Arguments and errors are those of :func:`auto_checkpoint`.
    """
    if (named := budget_of_environment()) is not None:
        try:
            parse_budget(named, 2**60)
        except BudgetError as error:
            raise BudgetError(f"the environment variable PLANNER_BUDGET: {error}") from None
    budget = named or budget
    if budget is None:
        raise BudgetError(f"{_NO_BUDGET}, or the environment variable PLANNER_BUDGET=8GiB")
    policy = checked(on_new_shape or "replan")
    wanted = checked_wanted(Wanted(budget, policy, cache, options, progress))
    check_model(model)
    refuse_wrappers(model, "plan")
    return None if plans_are_off() else wanted
