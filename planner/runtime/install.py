"""Putting a plan into a module, and taking it out again.

The planned module is the same object: its class, attributes, parameters, ``state_dict`` keys and
hooks stay. Only its call goes, while it trains, through the graphs that the plan describes.
"""

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from planner._torch import dynamo, modules
from planner._torch.compat import graphs_are_off
from planner._torch.execution.host_place import HostPlace
from planner._torch.tracing.callbacks import parts_run_uncompiled
from planner._torch.tracing.definitions import Definitions
from planner.blocks.running import blocks_run_as_written
from planner.capture.module_calls import run_forward
from planner.capture.uncaptured import AROUND
from planner.choices import is_recorded
from planner.compiled.calls import Calls
from planner.environment import plans_are_off
from planner.errors import PlanFileError, PlanMismatch, PlannerError, printable, warn
from planner.hooks.autocast_cast_cache import SHARED_WEIGHT_WARNING, unplanned_call
from planner.module_parts import named_parts
from planner.planfile.fingerprint import class_name, same_class, state_digest
from planner.planfile.plan import PlanRecord
from planner.planfile.schema import BY_OPERATORS
from planner.planning.backends import check_options_of_file
from planner.runtime.backend import PlanBackend
from planner.runtime.first_forward import CapturedAgain, OtherPaths, Path
from planner.runtime.installed import Companion, InstalledCall, install, take_out
from planner.runtime.own_errors import warn_unplanned
from planner.runtime.plan_call import PlanCall
from planner.runtime.recordings import Recordings
from planner.runtime.replayed import ReplayedCall
from planner.runtime.shapes.policy import NewShapes, OnNewShape, checked
from planner.runtime.unplanned import COMPILED_BEFORE
from planner.training_step.inputs import refuse_without_shape, refuse_wrappers
from planner.training_step.regions import RunningRegions
from planner.training_step.step import Loss


def apply(
    plan: PlanRecord,
    model: torch.nn.Module,
    *,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
    arena: bool = True,
    backend_options: Mapping[str, bool | int | float | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> torch.nn.Module:
    """Make a module train by a plan, in place; nothing where plans are off (``PLANNER=0``).

    Args:
        plan: A plan that was made for a module of the same class and state.
        model: The module. A plan that is installed already is replaced.
        on_new_shape, loss, arena, backend_options, offload_folder: See :meth:`Plan.apply`.

    Returns:
        The same module.

    Raises:
        PlanMismatch: If the plan was made for another model; the module is as it was.
        ValueError: If ``on_new_shape`` is not one of its three.
    """
    checked(on_new_shape)
    check_fits(plan, model, backend_options)
    if not plans_are_off():
        put_in(
            plan,
            model,
            on_new_shape=on_new_shape,
            loss=loss,
            arena=arena,
            offload_folder=offload_folder,
        )
    return model


def check_fits(
    plan: PlanRecord,
    model: torch.nn.Module,
    backend_options: Mapping[str, bool | int | float | str] | None = None,
) -> None:
    """Check that a plan is for a module of this class and state, and that its backend options are harmless.

    Args:
        plan: The plan.
        model: The module.
        backend_options: Options of the backend that the user gives beside the plan.

    Raises:
        PlanMismatch: The plan is for another module, or has options that the user has not given.
        PlannerError: Graphs were not tested with this PyTorch.
    """
    if plan.target.backend != "replay" and (off := graphs_are_off()) is not None:
        raise PlannerError(f"{off}, which this plan runs: plan again with backend='replay'")
    if plan.target.offload == "host":
        raise PlannerError(
            "a plan with offload='host' says what a step takes, and is not run yet: plan with "
            "offload='none', or for the CPU with offload='disk'"
        )
    if not isinstance(model, torch.nn.Module):
        raise PlanMismatch(f"a plan is applied to an nn.Module, not to {type(model).__name__}")
    refuse_without_shape(model, "apply the plan to")
    refuse_wrappers(model, "apply the plan to")
    found = class_name(model)
    if not same_class(plan.model.class_name, found):
        planned = printable(plan.model.class_name)
        raise PlanMismatch(f"the plan is for a {planned}, this is a {found}")
    if state_digest(model) != plan.model.state_digest:
        raise PlanMismatch(
            f"the plan is for a {found} with other parameters or buffers (names, shapes or dtypes differ); "
            "plan this one, or build the model as it was built for the plan"
        )
    there = filter(None, named_parts(model)) if plan.model.regions else ()
    if unknown := set(plan.model.regions).difference(there):
        raise PlanMismatch(
            f"the plan has regions that the {found} has not, as {printable(min(unknown))}: plan this one"
        )
    if plan is not installed_plan(model):  # the options of an installed plan were checked when it was applied
        check_options_of_file(plan, backend_options)


def put_in(
    plan: PlanRecord,
    model: torch.nn.Module,
    *,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
    arena: bool = True,
    offload_folder: str | os.PathLike[str] | None = None,
) -> PlanCall:
    """Install a plan that is known to be for this module, in place of one that is there.

    Raises:
        PlannerError: The call of the plan cannot be made; what is installed stays as it is.
    """
    call = _call_of(plan, model, on_new_shape, loss, arena, offload_folder)
    installed = modules.installed_call(model)
    call.previous = take_out(model)
    if call.previous is not None and call.previous is installed:
        warn(COMPILED_BEFORE)
    for part in map(modules.installed_call, model.modules()):
        if isinstance(part, InstalledCall):
            part.unplanned.planned_call()  # it runs by this plan, not by its own
    install(model, call)
    call.unplanned.wait()
    return call


def remove(model: torch.nn.Module) -> torch.nn.Module:
    """Take the plan out of a module, in place; a module without one is left alone.

    Returns:
        The same module.
    """
    if isinstance(modules.installed_call(model), InstalledCall):
        modules.install_call(model, take_out(model))
        vars(model).pop(Companion.NAME, None)
    return model


def _call_of(
    plan: PlanRecord,
    model: torch.nn.Module,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
    arena: bool = True,
    offload_folder: str | os.PathLike[str] | None = None,
) -> PlanCall:
    kind = ReplayedCall if plan.target.backend == "replay" else PlannedCall
    return kind(
        model,
        plan,
        None,
        on_new_shape,
        loss,
        arena=arena,
        restore=unpickled,
        offload_folder=offload_folder,
    )


def installed_plan(model: torch.nn.Module) -> PlanRecord | None:
    """The plan that a module trains by, or None."""
    installed = modules.installed_call(model)
    return installed.plan if isinstance(installed, PlanCall) else None


def unpickled(
    model: torch.nn.Module | None, text: str, on_new_shape: OnNewShape = "reapply", arena: bool = True
) -> Companion:
    """Install the plan of a pickled module where it is loaded."""
    if model is not None and not plans_are_off():
        try:
            plan = PlanRecord.loads(text, source="the plan of the pickled model")
            if plan.target.backend != "replay" and (off := graphs_are_off()) is not None:
                raise PlanFileError(off)
            # Its backend options need no check: whoever writes a pickle can run anything without them.
            install(model, _call_of(plan, model, checked(on_new_shape), arena=arena))
        except PlannerError as error:
            warn(
                f"the model is unpickled without its plan: {error}. Plan it again, or apply the "
                "plan from a file"
            )
    return Companion(model)


class PlannedCall(PlanCall):
    """A call that runs by graphs; see :class:`PlanCall`."""

    def _set_up(self) -> None:
        model, plan = self._model, self.plan
        self._calls = Calls(warn, plan.target.in_flight)
        self._regions = RunningRegions(plan.model.regions, self.unplanned.region_in_checkpoint)
        host = None if plan.target.offload == "none" else HostPlace(self.offload_folder)
        forward = id(_own_forward(model))
        found = weakref.ref(model)
        recorded = is_recorded(plan.target.backend, plan.target.backend_options)
        self._recordings = Recordings(plan, found, self._calls, warn) if recorded else None
        compile_ = partial(_compiled, found, forward, self._calls, self._regions, host, self._recordings)
        self._shapes = NewShapes(model, plan, self.on_new_shape, compile_, self.loss)
        self._warned_of_casts = False
        self._definitions: Definitions | None = None  # at the first planned step
        self._hooks: tuple[int, ...] | None = None  # on all modules, at the first planned step

    def retire(self) -> None:
        super().retire()
        self._regions.take_out(self._model)
        if self._recordings is not None:
            self._recordings.forget()

    def reinstall(self) -> None:
        """Install it again, with its regions and for calls of all kinds, after a snapshot was put back."""
        self._calls.return_to_all()
        modules.install_call(self._model, self)
        self._regions.put_in(self._model)

    def _in_other_mode(self, *args: Any, **kwargs: Any) -> Any:
        if not self._warned_of_casts:
            self._warned_of_casts = unplanned_call([p for p in self._model.parameters() if p.requires_grad])
            if self._warned_of_casts:
                warn(SHARED_WEIGHT_WARNING)
        return super()._in_other_mode(*args, **kwargs)

    def run_planned(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step by the plan, unless hooks or definitions have changed since the first planned step."""
        model = self._model
        hooks = modules.hooks_on_all_modules()
        if hooks != self._hooks:
            if self._hooks is not None:
                warn(
                    "hooks were registered on all modules at once, or taken away, since the first planned "
                    "step: it runs as it is, without the plan. Apply the plan again to have them captured"
                )
                return modules.module_call(model, *args, **kwargs)
            self.unplanned.planned_call()
            self._hooks = hooks
        self._ranks.check(model)
        if self._definitions is None:
            self._regions.put_in(model)
            self._definitions = Definitions(model)
        elif (changed := self._definitions.changed()) is not None:
            warn(
                f"{changed} was changed since the first planned step: it runs as it is, without the plan. "
                "Apply the plan again to have the change captured"
            )
            return modules.module_call(model, *args, **kwargs)
        return modules.call_with_forward(model, self._forward, args, kwargs)

    def captured(self) -> None:
        """Watch the definitions of newly captured classes, too."""
        if self._definitions is not None:
            self._definitions.include(self._model)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.begin(args, kwargs)
        self._begin_step()
        program = self._program_for(args, kwargs, run_forward)
        if program is run_forward:
            return program(self._model, args, kwargs)
        parts = parts_run_uncompiled() if self.plan.target.backend in BY_OPERATORS else nullcontext()
        with blocks_run_as_written(), parts:
            output = program(self._model, args, kwargs)
        self._end_step(args, kwargs)
        return output


def _own_forward(model: torch.nn.Module | None) -> object:
    """The ``forward`` that is set on a module itself; None where there is only its class's."""
    return None if model is None else vars(model).get("forward")


def _compiled(
    model: weakref.ref[torch.nn.Module],
    forward: int,
    calls: Calls,
    regions: RunningRegions,
    host: HostPlace | None,
    recordings: Recordings | None,
    plan: PlanRecord,
    warned_of_shapes: Callable[[], bool],
    other_paths: OtherPaths,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if plan.as_written:
        return run_forward, run_forward
    plan = plan.model_copy().remember(None)  # PyTorch holds compiled code: it must hold no optimizer, no loss

    def compile_(once_more: bool) -> list[CapturedAgain]:
        def replaced() -> bool:
            return id(_own_forward(model())) != forward

        paths = [
            Path(plan, captured_again=once_more, others=other_paths, replaced=replaced) for _ in range(2)
        ]
        backends = [
            PlanBackend(model, plan, warned_of_shapes, path, calls, _captured, host, recordings)
            for path in paths
        ]
        compiled, in_regions = (
            dynamo.dynamo_compile_shapes(
                run_forward,
                backends,
                _not_captured_any_more,
                _not_captured,
                _captured_often,
                plain=lambda: not paths[0].is_settled,
                parts=len(plan.model.regions),
                compiling=plan.target.backend == "inductor",
            )
            for _ in range(2)
        )
        compiled = [regions.during(*pair) for pair in zip(compiled, in_regions, strict=True)]
        return [CapturedAgain(paths[i], compiled[i], compile_, i, warn) for i in range(2)]

    planned, others = compile_(True)
    return planned, others


def _captured(model: torch.nn.Module) -> None:
    installed = modules.installed_call(model)
    if isinstance(installed, PlannedCall):
        installed.captured()


def _not_captured(error: Exception) -> None:
    warn_unplanned("a part of the forward that cannot be captured", error, AROUND)


def _captured_often(times: int) -> None:
    warn(
        f"the forward has been captured {times} times, which takes seconds each time: something that it uses "
        "changes with every call. Pass a number that changes, as a weight of the loss or a learning rate, as "
        "a tensor (torch.tensor(beta)), or keep it in a buffer; shapes become symbols"
    )


def _not_captured_any_more() -> None:
    warn(
        "the forward was captured so often that PyTorch gives up: it does something else at every call "
        "(by Python state, not by shapes: these become symbols). Where it does something new it runs as it "
        "is, without the plan. Put @torch.compiler.disable on the function that does this, or keep the state "
        "in a buffer"
    )
