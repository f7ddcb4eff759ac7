"""The call of a module whose plan is followed by replaying (:mod:`planner.replay`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from planner._torch import modules
from planner._torch.autograd import saved_tensors_hooks_are_allowed
from planner._torch.execution.cast_inside import note_operators
from planner._torch.tracing.callbacks import parts_run_uncompiled
from planner._torch.tracing.hindrances import END_IT
from planner.blocks.running import blocks_run_as_written
from planner.compiled.calls import Calls
from planner.errors import warn
from planner.parallel.sharded_as_planned import has_other_units
from planner.planfile.plan import PlanRecord
from planner.replay.follow import followed
from planner.replay.loaded_program import LoadedProgram
from planner.replay.program import program_of
from planner.replay.watched import FIRST_STEPS, ONE_IN, watched
from planner.runtime.first_forward import OtherPaths
from planner.runtime.plan_call import PlanCall
from planner.runtime.shapes.policy import NewShapes

OTHER_UNITS = (
    "fully_shard shards other parts of the module than planned, or the plan is for none: steps run as they "
    "are, without the plan, as re-runs would read parameters that are not gathered by then. Shard the plan's "
    "regions, or plan with parallel=planner.FSDP2(...) and with these parts as regions="
)


class ReplayedCall(PlanCall):
    """A call whose plan is followed by replaying; see :class:`PlanCall`."""

    def _set_up(self) -> None:
        self._calls, self._told_of_units = Calls(warn), False
        followers = partial(_followers, self._calls)
        self._shapes = NewShapes(self._model, self.plan, self.on_new_shape, followers, self.loss)

    def run_planned(self, *args: Any, **kwargs: Any) -> Any:
        self.unplanned.planned_call()
        self._ranks.check(self._model)
        if has_other_units(self.plan, self._model):
            if not self._told_of_units:
                self._told_of_units = True
                warn(OTHER_UNITS)
            return self.run_original(*args, **kwargs)
        if not saved_tensors_hooks_are_allowed():
            self.unplanned.hindered_call("disable_saved_tensors_hooks is on, and replays need some", END_IT)
            return self.run_original(*args, **kwargs)
        self._calls.begin()
        self._begin_step()
        output = self._program_for(args, kwargs, _as_it_is)(self._model, args, kwargs)
        self._end_step(args, kwargs)
        return output


def _followers(
    calls: Calls,
    plan: PlanRecord,
    others_came: Callable[[], bool],  # noqa: ARG001 - only compiled graphs ask
    paths: OtherPaths,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that run a module by a plan: one for the planned shape, which also warns of larger saved
    tensors, and one for other shapes."""
    note_operators()
    loaded, warned, begun = LoadedProgram(program_of(plan)), False, 0
    planned = plan.target.parallel
    # Calls by hooks on these modules are not counted: fully_shard gathers and frees by such hooks.
    units = ["", *plan.model.regions] if planned is not None and planned.kind == "fsdp2" else []

    def run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with blocks_run_as_written(), parts_run_uncompiled():  # as when the step was recorded
            return modules.module_call(model, *args, **kwargs)

    def watch(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal begun
        begun += 1
        if begun > FIRST_STEPS and begun % ONE_IN:
            return run(model, args, kwargs)
        forward = partial(run, model, args, kwargs)
        output, step = watched(loaded, forward, map(model.get_submodule, units))
        if step is not None:
            paths.met = paths.met or step.other_path
            step.tell_of_more()
        return output

    if not loaded.program.runs and plan.predicted.dynamic_peak_bytes >= plan.baseline.dynamic_peak_bytes:
        return watch, run  # nothing is dropped

    def follow(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal warned
        output, step = followed(loaded, lambda: run(model, args, kwargs), map(model.get_submodule, units))
        calls.last.follow(step.backward)
        if not step.followed:
            paths.met = True
            if not warned:
                warned = True
                warn(
                    f"{step.strayed_from}. Values that are not as planned are kept, and the step may take "
                    "more than predicted: plan the step as it is trained, with inputs that lead along this "
                    "path, or apply with on_new_shape='replan'"
                )
        return output, step

    def follow_planned(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, step = follow(model, args, kwargs)
        if step.followed:
            step.tell_of_more()
        return output

    return follow_planned, lambda *call: follow(*call)[0]


def _as_it_is(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return modules.module_call(model, *args, **kwargs)
