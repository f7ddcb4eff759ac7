"""A training step that is captured once and planned several times."""

from dataclasses import replace
from typing import Unpack

import torch

from planner.planfile.budget import parse_budget
from planner.planfile.fingerprint import state_digest
from planner.planning.options import PreparedKeywords, check_options, read_options, shows_options
from planner.planning.prepared import Prepared
from planner.planning.solve import find_solver, plan_prepared
from planner.progress import Progress, no_report
from planner.training_step.inputs import InputError
from planner.user_plan import Plan


class PreparedStep:
    """What :func:`planner.prepare` returns.

    Args:
        prepared: The captured step.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._trained, self._modes = _trained(prepared.model), _modes(prepared.model)

    @shows_options(PreparedKeywords)
    def plan(
        self, budget: int | str, *, progress: Progress | None = None, **options: Unpack[PreparedKeywords]
    ) -> Plan:
        """Plan the step for a budget.

        Args:
            budget: As for :func:`planner.plan`.
            progress: Called with a text and a fraction from 0 to 1.
            **options: See :class:`planner.planning.options.PlanOptions`.

        Raises:
            InputError: Parameters or buffers of the model have other shapes than when it was prepared,
                others train, or a part of it is in another mode.

        All other errors are those of :func:`planner.plan`.
        """
        check_options(progress=progress)
        find_solver(read_options("plan", PreparedKeywords, options).solver)
        parse_budget(budget, 2**60)
        model = self._prepared.model
        if state_digest(model) != self._prepared.state_digest:
            raise InputError(
                f"parameters or buffers of the {type(model).__name__} have changed since planner.prepare(): "
                "prepare it again"
            )
        if changed := _trained(model) ^ self._trained:
            raise InputError(
                f"{min(changed)} has another requires_grad than at planner.prepare(): prepare the "
                f"{type(model).__name__} again"
            )
        if changed := _modes(model) ^ self._modes:
            raise InputError(
                f"{min(changed)} is in another mode, of training or evaluation, than at planner.prepare(): "
                f"prepare the {type(model).__name__} again"
            )
        # What is not said here is as it was said to `prepare`.
        prepared = replace(self._prepared, options=replace(self._prepared.options, **options))
        return Plan.of(plan_prepared(prepared, budget, progress=progress or no_report))

    def __repr__(self) -> str:
        graph = self._prepared.problem.graph
        name = type(self._prepared.model).__name__
        return f"<PreparedStep of {name}: {len(graph.ops):,} operations, for {self._prepared.device.name}>"


def _trained(model: torch.nn.Module) -> set[str]:
    """The names of the parameters that train."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _modes(model: torch.nn.Module) -> set[str]:
    """The names of the parts that are in another mode than the module itself."""
    return {name for name, part in model.named_modules() if part.training is not model.training}
