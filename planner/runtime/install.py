"""Putting a plan into a module, and taking it out again.

The planned module is the same object: its class, attributes, parameters, ``state_dict`` keys and
hooks stay. Only its call goes, while it trains, through the graphs that the plan describes.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from planner._torch import dynamo, modules
from planner._torch.tracing import torchscript
from planner._torch.tracing.definitions import Definitions
from planner._torch.tracing.inside_compile import RUNS_A_PLAN, holds_dtensors, not_compiled
from planner.capture.capture import run_forward
from planner.errors import PlanFileError, PlanMismatch, warn
from planner.hooks.autocast_cast_cache import SHARED_WEIGHT_WARNING, unplanned_call
from planner.hooks.awaiting_backward import Calls
from planner.planfile.fingerprint import class_name, same_class, state_digest
from planner.planfile.plan import Plan
from planner.runtime.backend import PlanBackend
from planner.runtime.ddp import RankCheck
from planner.runtime.first_forward import CapturedAgain, Path
from planner.runtime.own_errors import unplanned
from planner.runtime.shape_policy import NewShapes, OnNewShape, checked, shape_key
from planner.runtime.unplanned import COMPILED_BEFORE, Unplanned, displaced
from planner.training_step.sharded import SHARDED
from planner.training_step.step import Loss
from planner.training_step.wrappers import refuse_wrappers


def apply(
    plan: Plan,
    model: torch.nn.Module,
    *,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
) -> torch.nn.Module:
    """Make a module train by a plan, in place.

    Args:
        plan: A plan that was made for a module of the same class and state.
        model: The module. A plan that is installed already is replaced.
        on_new_shape, loss: See :meth:`Plan.apply`.

    Returns:
        The same module.

    Raises:
        PlanMismatch: If the plan was made for another model; the module is as it was.
        ValueError: If ``on_new_shape`` is not one of its three.
    """
    checked(on_new_shape)
    if not isinstance(model, torch.nn.Module):
        raise PlanMismatch(f"a plan is applied to an nn.Module, not to {type(model).__name__}")
    refuse_wrappers(model, "apply the plan to")
    found = class_name(model)
    if not same_class(plan.model.class_name, found):
        raise PlanMismatch(f"the plan is for a {plan.model.class_name}, this is a {found}")
    if state_digest(model) != plan.model.state_digest:
        raise PlanMismatch(
            f"the plan is for a {found} with other parameters or buffers (names, shapes or dtypes differ); "
            "plan this one, or build the model as it was built for the plan"
        )
    previous = modules.installed_call(model)
    if isinstance(previous, PlannedCall):
        previous.retire()
        previous = previous.previous
    elif previous is not None:
        warn(COMPILED_BEFORE)
    for part in map(modules.installed_call, model.modules()):
        if isinstance(part, PlannedCall):
            part.unplanned.planned_call()  # it runs by this plan, not by its own
    _install(model, plan, previous, on_new_shape, loss).unplanned.wait()
    return model


def remove(model: torch.nn.Module) -> torch.nn.Module:
    """Take the plan out of a module, in place; a module without one is left alone.

    Returns:
        The same module.
    """
    installed = modules.installed_call(model)
    if isinstance(installed, PlannedCall):
        installed.retire()
        modules.install_call(model, installed.previous)
        vars(model).pop(_Companion.NAME, None)
    return model


def _install(
    model: torch.nn.Module,
    plan: Plan,
    previous: Callable[..., Any] | None = None,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
) -> "PlannedCall":
    call = PlannedCall(model, plan, previous, on_new_shape, loss)
    modules.install_call(model, call)
    vars(model)[_Companion.NAME] = _Companion(model)
    return call


def installed_plan(model: torch.nn.Module) -> Plan | None:
    """The plan that a module trains by, or None."""
    installed = modules.installed_call(model)
    return installed.plan if isinstance(installed, PlannedCall) else None


class _Companion:
    """Lives among a planned module's attributes and, when they are copied or pickled, plans the copy too.

    PyTorch leaves out of copies what is installed in place of a module's call. A copy exists, without its
    attributes, before they are copied: that is when the plan is installed in it.
    """

    NAME = "_planner_companion"

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Companion":
        copied = memo.get(id(self._model))
        call = None if self._model is None else modules.installed_call(self._model)
        if isinstance(copied, torch.nn.Module) and isinstance(call, PlannedCall):
            _install(copied, call.plan, None, call.on_new_shape, call.loss)
        return _Companion(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        call = None if self._model is None else modules.installed_call(self._model)
        if not isinstance(call, PlannedCall):
            return _companion_from_pickle, (self._model, None)
        return _companion_from_pickle, (self._model, call.plan.dumps(), call.on_new_shape)


def _companion_from_pickle(
    model: torch.nn.Module | None, text: str | None, on_new_shape: OnNewShape = "reapply"
) -> _Companion:
    if model is not None and text is not None:
        try:
            plan = Plan.loads(text, source="the plan of the pickled model")
            _install(model, plan, None, checked(on_new_shape))
        except PlanFileError as error:
            warn(f"the model is unpickled without its plan: {error}")
    return _Companion(model)


class PlannedCall:
    """What a planned module runs in place of its own call.

    Attributes:
        plan: The plan.
        previous: What was installed before, by ``module.compile()`` for instance.
        on_new_shape, loss: As they were given to :func:`apply`.
        unplanned: Notices training without the plan.
    """

    _retired = False

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        previous: Callable[..., Any] | None,
        on_new_shape: OnNewShape = "reapply",
        loss: Loss | None = None,
    ) -> None:
        self.plan, self.previous = plan, previous
        self._model = model
        self._training = plan.model.training
        self.on_new_shape, self.loss = on_new_shape, loss
        self._calls = Calls(warn)
        compile_ = partial(_compiled, weakref.ref(model), self._calls)
        self._shapes = NewShapes(model, plan, on_new_shape, compile_, loss)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._compare_ranks: RankCheck | None = RankCheck(plan, on_new_shape)
        self._warned_of_casts = False
        self._definitions: Definitions | None = None  # at the first planned step
        self._hooks: tuple[int, ...] | None = None  # on all modules, at the first planned step
        self.unplanned = Unplanned(model, self._training)
        setattr(self, RUNS_A_PLAN, True)

    def retire(self) -> None:
        """Another call is installed on purpose."""
        self.unplanned.planned_call()
        self._retired = True

    def reinstate(self, *, waiting: bool) -> None:
        """It is installed again; ``waiting`` for the first planned call, which has not come yet."""
        self._retired = False
        if waiting:
            self.unplanned.wait()

    def __del__(self) -> None:  # what is installed in its place lets go of it
        if not self._retired and not sys.is_finalizing():
            displaced(self._model, self)

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if torchscript.is_traced():  # what is recorded is the module, not the plan
            return modules.module_call(model, *args, **kwargs)
        if model.training is not self._training or not torch.is_grad_enabled():
            if torch.is_grad_enabled() and not self._warned_of_casts:
                self._warned_of_casts = unplanned_call([p for p in model.parameters() if p.requires_grad])
                if self._warned_of_casts:
                    warn(SHARED_WEIGHT_WARNING)
            call = partial(modules.module_call, model) if self.previous is None else self.previous
            output = call(*args, **kwargs)
            if model.training is not self._training and torch.is_grad_enabled():
                self.unplanned.called_in_other_mode(output)
            return output
        if self._compare_ranks is not None and self._compare_ranks():
            self._compare_ranks = None
        hooks = modules.hooks_on_all_modules()
        if hooks != self._hooks:
            if self._hooks is not None:
                warn(
                    "hooks were registered on all modules at once, or taken away, since the first planned "
                    "step: it runs as it is, without the plan. Apply the plan again to have them captured"
                )
                return modules.module_call(model, *args, **kwargs)
            self._hooks = hooks
            self.unplanned.planned_call()
            if holds_dtensors(model):
                warn(SHARDED)
        if self._definitions is None:
            self._definitions = Definitions(model)
        elif (changed := self._definitions.changed()) is not None:
            warn(
                f"{changed} was changed since the first planned step: it runs as it is, without the plan. "
                "Apply the plan again to have the change captured"
            )
            return modules.module_call(model, *args, **kwargs)
        return modules.call_with_forward(model, self._forward, args, kwargs)

    def captured(self) -> None:
        """Look after the classes of what was captured now, too."""
        if self._definitions is not None:
            self._definitions.include(self._model)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.begin()
        key = None
        try:
            key = shape_key(args, kwargs)
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._shapes.program(args, kwargs)
        except Exception as error:
            unplanned("a step with inputs that have not been seen before", error)
            program = self._programs[key] = run_forward
        return program(self._model, args, kwargs)


def _compiled(
    model: weakref.ref[torch.nn.Module], calls: Calls, plan: Plan, warned_of_shapes: Callable[[], bool]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def compile_(once_more: bool) -> list[CapturedAgain]:
        paths = [Path(plan, captured_again=once_more) for _ in range(2)]
        backends = [PlanBackend(model, plan, warned_of_shapes, path, calls, _captured) for path in paths]
        compiled = dynamo.dynamo_compile_shapes(run_forward, backends, _not_captured_any_more, _not_captured)
        return [CapturedAgain(paths[i], compiled[i], lambda: compile_(False), i, warn) for i in range(2)]

    planned, others = compile_(True)
    return planned, others


def _captured(model: torch.nn.Module) -> None:
    installed = modules.installed_call(model)
    if isinstance(installed, PlannedCall):
        installed.captured()


def _not_captured(error: Exception) -> None:
    unplanned("a part of the forward that cannot be captured", error)


def _not_captured_any_more() -> None:
    warn(
        "the forward was captured so often that PyTorch gives up: what it does changes with every call "
        "(Python state, not shapes: these become symbols). It runs as it is, without the plan, where it "
        "does something new"
    )
