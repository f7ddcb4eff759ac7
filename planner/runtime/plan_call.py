"""The call of a planned module: guards decide whether it runs by the plan, or which function runs instead.

Subclasses follow the plan, by graphs (``install.py``) or by replay (``replayed.py``).
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
from planner.runtime.own_errors import PLAN_WITH_THESE, warn_unplanned
from planner.runtime.shapes.arguments import shape_key
from planner.runtime.shapes.policy import NewShapes, OnNewShape
from planner.training_step.step import Loss, differentiates, map_tensors

Run = Callable[..., Any]
"""A function that gets the arguments of a call of the module, and returns its output."""


class Replacement(Protocol):
    """Gets the arguments of a step; returns the function to run instead of the plan, or None to follow it."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None: ...


class PlanCall(InstalledCall):
    """A call that runs by a plan, unless one of its guards returns a function that runs instead.

    Attributes:
        plan: The plan.
        on_new_shape, loss, arena, offload_folder: As :func:`planner.runtime.install.apply` was given them.
        when_accumulating: Called when a step begins with gradients, and the plan counts none. If it raises
            SkippedStep, the next such step calls it again. None: the user is warned.
        when_changed: Called before every step, to plan again if parameters grew or were unfrozen. None: they
            are not looked at.
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
        restore: Callable[..., Any],
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            restore: Applies the plan again where a pickled module is loaded. Pickles refer to it by name.
        """
        super().__init__(model, previous, plan.model.training)
        self.plan, self.on_new_shape, self.loss, self._restore = plan, on_new_shape, loss, restore
        self.arena, self.offload_folder = arena, offload_folder
        self._arena = Arena.of(plan.whole_step if arena else None, plan.resident)
        self._ranks = Ranks(plan, on_new_shape)
        self.when_accumulating: Replacement | None = None
        self.when_changed: Replacement | None = None
        self._programs: dict[Any, Callable[..., Any]] = {}
        # The arguments of the last step, if its forward took a path that the plan does not have.
        self._strayed_arguments: tuple[Any, Any] | None = None
        self._cpu_settings = CpuSettings(plan)
        # Finds gradients that are there when a step begins. None if the plan counts them, or some were found.
        self._earlier: EarlierGradients | None = None
        if plan.resident.gradient_bytes == 0:
            self._earlier = EarlierGradients(model.modules)
        self._set_up()

    def _set_up(self) -> None:
        """Set ``_calls``, ``_shapes`` and further attributes of the subclass."""
        raise NotImplementedError

    def install_in(self, copied: torch.nn.Module) -> None:
        call = type(self)(
            copied,
            self.plan,
            None,
            self.on_new_shape,
            self.loss,
            arena=self.arena,
            restore=self._restore,
            offload_folder=self.offload_folder,
        )
        install(copied, call)

    def pickled(self) -> tuple[Any, ...]:
        return self._restore, self.plan.dumps(), self.on_new_shape, self.arena

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

    def reinstall(self) -> None:
        """Install the call again, after a snapshot of the module was restored."""
        modules.install_call(self._model, self)

    # ---- guards: each returns a function that runs instead of the plan, or None ----------------------------

    def _is_of_a_clone(self, args: Any, kwargs: Any) -> Run | None:
        clone = self.clone()
        return None if clone is None else lambda *a, **k: self.run_clone(clone, a, k)

    def _is_recorded(self, args: Any, kwargs: Any) -> Run | None:
        """Whether this call is recorded for planning: the recording is of the module as written."""
        return self._as_written if recording.is_recorded() else None

    def _is_no_step(self, args: Any, kwargs: Any) -> Run | None:
        """Whether gradients are off, or the module is in another mode, training or not, than planned."""
        if not torch.is_grad_enabled():
            return self.run_original
        return None if self._model.training is self._training else self._in_other_mode

    def _is_hindered(self, args: Any, kwargs: Any) -> Run | None:
        """Whether a mode of PyTorch is on under which no plan can be followed; it warns."""
        if (hindrance := hindering_mode()) is None:
            return None
        self.unplanned.hindered_call(hindrance, END_IT)
        return self.run_original

    def _is_part_of_a_replay(self, args: Any, kwargs: Any) -> Run | None:
        """Whether it runs inside a module that is replayed by a plan of its own, which covers this one too.

        That is a module around this one, or this one, where its forward calls itself.
        """
        return self.run_original if is_inside_a_replay() else None

    def _is_left_to_the_module(self, args: Any, kwargs: Any) -> Run | None:
        """Whether calls of this kind run without the plan from an earlier one on, which warned."""
        return self.run_original if self._calls.is_left(args, kwargs) else None

    def _has_changed(self, args: Any, kwargs: Any) -> Run | None:
        """Whether parameters have changed so that another plan was made."""
        return None if self.when_changed is None else self.when_changed(args, kwargs)

    def _accumulates(self, args: Any, kwargs: Any) -> Run | None:
        """Whether the step adds to gradients that the plan does not count; warns, or has another plan run."""
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

    # In this order: whose call is it, is the plan for such a call, can a plan be followed here, is another
    # plan wanted? Each guard may rely on those before it.
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

    # ---- helpers of the guards, and of subclasses ----------------------------------------------------------

    def _as_written(self, *args: Any, **kwargs: Any) -> Any:
        return modules.module_call(self._model, *args, **kwargs)

    def _in_other_mode(self, *args: Any, **kwargs: Any) -> Any:
        output = self.run_original(*args, **kwargs)
        if self._model.training is not self._training and torch.is_grad_enabled():
            self.unplanned.called_in_other_mode(output)
        return output

    def _forget_gradients(self) -> None:
        """Look for earlier gradients no more: the user was warned of them, or another plan counts them."""
        self._earlier = None

    def _begin_step(self) -> None:
        """Check settings, reserve the arena; plan again if the last step strayed, see :meth:`_end_step`."""
        self._cpu_settings.check()
        self._arena.before_step(self._model)
        if self._strayed_arguments is not None:
            if self._shapes.look_at_path(*self._strayed_arguments):
                self._programs.clear()
            self._strayed_arguments = None

    def _program_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], unplanned_run: Run
    ) -> Callable[..., Any]:
        """The program for arguments of these shapes: a function of the module, args and kwargs.

        Args:
            unplanned_run: Runs the step without the plan.
        """
        key = None
        try:
            key = shape_key(args, kwargs)
            program = self._programs.get(key)
            if program is None:
                if not differentiates(self._model, args, kwargs):
                    return unplanned_run  # nothing requires a gradient: nothing is kept for a backward
                program = self._programs[key] = self._shapes.program(args, kwargs)
        except Exception as error:
            warn_unplanned("a step with inputs that have not been seen before", error, PLAN_WITH_THESE)
            program = self._programs[key] = unplanned_run
        return program

    def _end_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With "replan", keep the arguments of a step that took an unseen path.

        The next step plans for that path when it begins. Now the values that the forward keeps take memory,
        which planning needs.
        """
        if self.on_new_shape == "replan" and self._shapes.strayed:
            self._strayed_arguments = map_tensors(
                lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs)
            )
