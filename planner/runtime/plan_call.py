"""The call of a planned module: guards decide whether the plan runs it, then a program is chosen for it.

Subclasses follow the plan.
"""

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from planner._torch import modules
from planner._torch.tracing import recording
from planner._torch.tracing.hindrances import END_IT, hindering_mode, is_inside_a_replay
from planner._torch.tracing.inside_compile import not_compiled
from planner.compiled.calls import Calls
from planner.errors import SkippedStep
from planner.planfile.plan import PlanRecord
from planner.runtime.arena import Arena
from planner.runtime.cpu_settings import CpuSettings
from planner.runtime.ddp import Ranks
from planner.runtime.earlier_gradients import EarlierBytes, EarlierGradients
from planner.runtime.installed import InstalledCall, install
from planner.runtime.own_errors import PLAN_WITH_THESE, unplanned
from planner.runtime.shapes.arguments import shape_key
from planner.runtime.shapes.policy import NewShapes, OnNewShape
from planner.training_step.step import Loss, differentiates, map_tensors

Run = Callable[..., Any]
"""Runs a call, given its arguments."""


class Instead(Protocol):
    """Given a step's arguments, returns a function to run instead of this plan; None to follow the plan."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None: ...


class PlanCall(InstalledCall):
    """A call that runs by a plan, unless one of its guards has something else run.

    Attributes:
        plan: The plan.
        on_new_shape, loss, arena, offload_folder: As :func:`planner.runtime.install.apply` was given them.
        when_accumulating: Asked when a step begins with gradients from before, of a plan that counts none;
            without it the user is warned. It may raise SkippedStep, and is asked again then.
        when_changed: Asked before every step, if parameters may grow or thaw.
    """

    _calls: Calls
    _shapes: NewShapes

    def __init__(
        self,
        model: torch.nn.Module,
        plan: PlanRecord,
        previous: Callable[..., Any] | None,
        on_new_shape: OnNewShape = "reapply",
        loss: Loss | None = None,
        *,
        arena: bool = True,
        unpickled: Callable[..., Any],
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            unpickled: The function that restores the call when a pickled module is loaded.
        """
        super().__init__(model, previous, plan.model.training)
        self.plan, self.on_new_shape, self.loss, self._unpickled = plan, on_new_shape, loss, unpickled
        self.arena, self.offload_folder = arena, offload_folder
        self._arena = Arena.of(plan.whole_step if arena else None, plan.resident)
        self._ranks = Ranks(plan, on_new_shape)
        self.when_accumulating: Instead | None = None
        self.when_changed: Instead | None = None
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._strayed_arguments: tuple[Any, Any] | None = None  # arguments of a step that took an unseen path
        # Watches for gradients at the beginning of a step until there are some, if the plan counts none.
        self._earlier: EarlierGradients | None = None
        self._settings = CpuSettings(plan)
        if plan.resident.gradient_bytes == 0:
            self._earlier = EarlierGradients(model.modules)
        self._set_up()

    def _set_up(self) -> None:
        """Make the objects that follow the plan."""
        raise NotImplementedError

    def install_in(self, copied: torch.nn.Module) -> None:
        call = type(self)(
            copied,
            self.plan,
            None,
            self.on_new_shape,
            self.loss,
            arena=self.arena,
            unpickled=self._unpickled,
            offload_folder=self.offload_folder,
        )
        install(copied, call)

    def pickled(self) -> tuple[Any, ...]:
        return self._unpickled, self.plan.dumps(), self.on_new_shape, self.arena

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for guard in self._GUARDS:
            run = guard(self, args, kwargs)
            if run is not None:
                return run(*args, **kwargs)
        return self.run_planned(*args, **kwargs)

    def run_planned(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step by the plan."""
        raise NotImplementedError

    def put_back_in(self) -> None:
        """Install it again, after a snapshot was put back."""
        modules.install_call(self._model, self)

    # ---- guards, in the order in which they are asked: a function to run instead, or None ------------------

    def _is_of_a_clone(self, args: Any, kwargs: Any) -> Run | None:
        clone = self.clone()
        return None if clone is None else lambda *a, **k: self.run_clone(clone, a, k)

    def _is_recorded(self, args: Any, kwargs: Any) -> Run | None:
        """A recording is of the module, not of the plan."""
        return self._as_written if recording.is_recorded() else None

    def _is_no_step(self, args: Any, kwargs: Any) -> Run | None:
        if not torch.is_grad_enabled():
            return self.run_original
        return None if self._model.training is self._training else self._in_other_mode

    def _is_hindered(self, args: Any, kwargs: Any) -> Run | None:
        if (hindrance := hindering_mode()) is None:
            return None
        self.unplanned.hindered_call(hindrance, END_IT)
        return self.run_original

    def _is_part_of_a_replay(self, args: Any, kwargs: Any) -> Run | None:
        """The module around it is followed, and this part with it: it has a plan too, or calls itself."""
        return self.run_original if is_inside_a_replay() else None

    def _is_left_to_the_module(self, args: Any, kwargs: Any) -> Run | None:
        """Nothing warns here: there was a warning when such calls were first left to the module."""
        return self.run_original if self._calls.is_left(args, kwargs) else None

    def _has_changed(self, args: Any, kwargs: Any) -> Run | None:
        return None if self.when_changed is None else self.when_changed(args, kwargs)

    def _accumulates(self, args: Any, kwargs: Any) -> Run | None:
        earlier = self._earlier is not None and self._earlier.are_there()
        if not earlier or not differentiates(self._model, args, kwargs):
            return None
        if self.when_accumulating is None:
            earlier_bytes = EarlierBytes(self.plan, self._model, self._forget_gradients)
            return lambda *a, **k: earlier_bytes.watched(self.run_planned(*a, **k))
        try:
            run = self.when_accumulating(args, kwargs)
        except SkippedStep:
            return None
        self._forget_gradients()
        return run

    # First: whose call is it? Then: is the plan for such a call? Then: can a plan be followed here? Last: is
    # another plan wanted? Each guard may rely on those before it.
    _GUARDS = (
        _is_of_a_clone,
        _is_recorded,
        _is_no_step,
        _is_part_of_a_replay,
        _is_hindered,
        _is_left_to_the_module,
        _has_changed,
        _accumulates,
    )

    # ---- for subclasses, which follow plans ----------------------------------------------------------------

    def _as_written(self, *args: Any, **kwargs: Any) -> Any:
        return modules.module_call(self._model, *args, **kwargs)

    def _in_other_mode(self, *args: Any, **kwargs: Any) -> Any:
        output = self.run_original(*args, **kwargs)
        if self._model.training is not self._training and torch.is_grad_enabled():
            self.unplanned.called_in_other_mode(output)
        return output

    def _forget_gradients(self) -> None:
        """Watch for earlier gradients no more: the user was warned of them, or another plan counts them."""
        self._earlier = None

    def _begin(self) -> None:
        """Reserve the arena. With "replan", plan again if the last step took another path than planned."""
        self._settings.look()
        self._arena.before_step(self._model)
        if self._strayed_arguments is not None:
            if self._shapes.look_at_path(*self._strayed_arguments):
                self._programs.clear()
            self._strayed_arguments = None

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], unplanned_run: Run
    ) -> Callable[..., Any]:
        """The program for such arguments: a function of the module, args and kwargs.

        Args:
            unplanned_run: Runs the step without the plan.
        """
        key = None
        try:
            key = shape_key(args, kwargs)
            program = self._programs.get(key)
            if program is None:
                if not differentiates(self._model, args, kwargs):
                    return unplanned_run  # without gradients nothing is kept
                program = self._programs[key] = self._shapes.program(args, kwargs)
        except Exception as error:
            unplanned("a step with inputs that have not been seen before", error, PLAN_WITH_THESE)
            program = self._programs[key] = unplanned_run
        return program

    def _end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a step that took an unseen path, to plan for it when the next step begins.

        Planning waits until then, as now the values that the forward keeps take the memory.
        """
        if self.on_new_shape == "replan" and self._shapes.strayed:
            self._strayed_arguments = map_tensors(
                lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs)
            )
