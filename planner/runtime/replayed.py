"""A module that trains by a plan which is followed by replaying."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from planner._torch import modules
from planner._torch.tracing import recording
from planner._torch.tracing.callbacks import parts_run_uncompiled
from planner._torch.tracing.hindrances import END_IT, hindering_mode
from planner._torch.tracing.inside_compile import not_compiled
from planner.blocks.running import blocks_run_as_written
from planner.compiled.calls import Calls
from planner.errors import warn
from planner.parallel.sharded_as_planned import has_other_units
from planner.planfile.plan import PlanRecord
from planner.replay.follow import Steps, followed
from planner.replay.program import program_of
from planner.runtime.ddp import Ranks
from planner.runtime.earlier_gradients import EarlierBytes, EarlierGradients
from planner.runtime.first_forward import OtherPaths
from planner.runtime.installed import InstalledCall, install
from planner.runtime.own_errors import PLAN_WITH_THESE, unplanned
from planner.runtime.shapes.policy import NewShapes, OnNewShape
from planner.runtime.shapes.shape_key import shape_key
from planner.training_step.step import Loss, differentiates, map_tensors

OTHER_UNITS = (
    "fully_shard shards other parts of the module than planned, or the plan is for none: steps run as they "
    "are, without the plan, as re-runs would read parameters that are not gathered by then. Shard what the "
    "plan has as regions, or plan with parallel=planner.FSDP2(...) and with these parts as regions="
)


class ReplayedCall(InstalledCall):
    """What such a module runs in place of its own call.

    Attributes:
        plan: The plan.
        on_new_shape, loss: As they were given to :func:`planner.runtime.install.apply`.
        when_accumulating, when_changed: As of :class:`planner.runtime.install.PlannedCall`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: PlanRecord,
        previous: Callable[..., Any] | None,
        on_new_shape: OnNewShape = "reapply",
        loss: Loss | None = None,
        *,
        unpickled: Callable[..., Any],
    ) -> None:
        """
        Args:
            unpickled: Restores it where a pickled module is loaded.
        """
        super().__init__(model, previous, plan.model.training)
        self._unpickled = unpickled
        self.plan, self.on_new_shape, self.loss = plan, on_new_shape, loss
        self.when_accumulating: Callable[..., Callable[..., Any] | None] | None = None
        self.when_changed: Callable[..., Callable[..., Any] | None] | None = None
        self._calls = Calls(warn)
        self._shapes = NewShapes(model, plan, on_new_shape, partial(_followers, self._calls), loss)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._ranks = Ranks(plan, on_new_shape)
        self._told_of_units = False
        self._strayed: tuple[Any, Any] | None = None  # arguments of a step that took an unseen path
        self._earlier: EarlierGradients | None = None
        if plan.resident.gradient_bytes == 0:
            self._earlier = EarlierGradients(model.modules)

    def install_in(self, copied: torch.nn.Module) -> None:
        again = ReplayedCall(copied, self.plan, None, self.on_new_shape, self.loss, unpickled=self._unpickled)
        install(copied, again)

    def put_back_in(self) -> None:
        """Install it again, where a snapshot has put back what was there before."""
        modules.install_call(self._model, self)

    def pickled(self) -> tuple[Any, ...]:
        return self._unpickled, self.plan.dumps(), self.on_new_shape

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (clone := self.clone()) is not None:
            return self.run_clone(clone, args, kwargs)
        model = self._model
        if recording.is_recorded():  # what is recorded is the module, not the plan
            return modules.module_call(model, *args, **kwargs)
        if model.training is not self._training or not torch.is_grad_enabled():
            output = self.run_original(*args, **kwargs)
            if model.training is not self._training and torch.is_grad_enabled():
                self.unplanned.called_in_other_mode(output)
            return output
        if (hindrance := hindering_mode()) is not None:
            self.unplanned.hindered_call(hindrance, END_IT)
            return self.run_original(*args, **kwargs)
        if self.when_changed is not None and (planned := self.when_changed(args, kwargs)) is not None:
            return planned(*args, **kwargs)
        earlier = self._earlier is not None and self._earlier.are_there()
        if earlier and differentiates(model, args, kwargs):
            if self.when_accumulating is None:
                there = EarlierBytes(self.plan, model, self._told_of_gradients)
                return there.watched(self._planned(args, kwargs))
            self._earlier = None
            if (planned := self.when_accumulating(args, kwargs)) is not None:
                return planned(*args, **kwargs)
        return self._planned(args, kwargs)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._model
        self.unplanned.planned_call()
        self._ranks.look(model)
        if has_other_units(self.plan, model):
            if not self._told_of_units:
                self._told_of_units = True
                warn(OTHER_UNITS)
            return self.run_original(*args, **kwargs)
        self._calls.begin()
        if self._strayed is not None:
            if self._shapes.look_at_path(*self._strayed):
                self._programs.clear()
            self._strayed = None
        key = shape_key(args, kwargs)
        program = self._programs.get(key)
        if program is None:
            if not differentiates(model, args, kwargs):
                return self.run_original(*args, **kwargs)
            program = self._programs[key] = self._program(args, kwargs)
        output = program(model, args, kwargs)
        if self.on_new_shape == "replan" and self._shapes.strayed:
            self._strayed = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs))
        return output

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What runs arguments of a shape that has not been seen before."""
        try:
            return self._shapes.program(args, kwargs)
        except Exception as error:
            unplanned("a step with inputs that have not been seen before", error, PLAN_WITH_THESE)
            return lambda model, args, kwargs: modules.module_call(model, *args, **kwargs)

    def _told_of_gradients(self) -> None:
        self._earlier = None


def _followers(
    calls: Calls,
    plan: PlanRecord,
    others_came: Callable[[], bool],  # noqa: ARG001 - what is compiled asks it
    paths: OtherPaths,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What runs a module by a plan, at the planned shape and at others alike."""
    steps = Steps(program_of(plan))
    if not steps.program.runs and plan.predicted.dynamic_peak_bytes >= plan.baseline.dynamic_peak_bytes:
        return _as_it_is, _as_it_is  # nothing is dropped

    warned = False
    planned = plan.target.parallel
    # In which nothing of a module's hooks is counted: fully_shard gathers and frees by these.
    units = ["", *plan.model.regions] if planned is not None and planned.kind == "fsdp2" else []

    def follow(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal warned
        with blocks_run_as_written(), parts_run_uncompiled():  # as they were recorded
            output, step = followed(
                steps, lambda: modules.module_call(model, *args, **kwargs), map(model.get_submodule, units)
            )
        calls.last.follow(step)
        if not step.followed:
            paths.met = True
            if not warned:
                warned = True
                warn(
                    f"the forward took a path that the plan has not seen: of the plan's {len(step.calls)} "
                    f"calls of operators {step.as_planned} ran, and what others made is kept. The step may "
                    "take more than predicted; plan with inputs that lead along this path, or apply with "
                    "on_new_shape='replan'"
                )
        return output

    return follow, follow


def _as_it_is(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return modules.module_call(model, *args, **kwargs)
