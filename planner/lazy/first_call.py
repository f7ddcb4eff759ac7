"""The call that is installed in a module until its first training call, which plans it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from planner._torch.distributed import holds_dtensors
from planner._torch.tracing import recording
from planner._torch.tracing.hindrances import END_IT, hindering_mode
from planner._torch.tracing.inside_compile import not_compiled
from planner.capture.captured_step import NO_LOSS
from planner.environment import plans_are_off, tell
from planner.errors import CaptureError, SkippedStep, warn
from planner.lazy.changed_parameters import Grown, Thawed
from planner.lazy.make import Made, Wanted, planned_or_cached
from planner.lazy.rank_zero import first_rank, planned_by_rank_zero
from planner.parallel.data_parallel import wrapped_here
from planner.planfile.budget import format_bytes
from planner.runtime.install import check_fits, put_in
from planner.runtime.installed import Companion, InstalledCall, install, take_out
from planner.runtime.plan_call import PlanCall
from planner.training_step.inputs import read_step, without_shape
from planner.training_step.step import differentiates

LOSS_OUTSIDE = (
    "; the loss is computed outside the module and its memory is not counted: pass loss= to count it"
)

GIVEN_UP = "Mend that, and call auto_checkpoint again; planner.remove(model) leaves the module as it is"


class PlannedAtFirstCall(InstalledCall):
    """Plans a module at its first training call, and is replaced by the plan.

    Args:
        model: The module.
        previous: The call that was installed before.
        wanted: The options of the plan.
    """

    def __init__(self, model: torch.nn.Module, previous: Callable[..., Any] | None, wanted: Wanted) -> None:
        super().__init__(model, previous, wanted.options.training)
        self.wanted = wanted
        self._given_up = False  # the step cannot be captured: from then on it runs as it is

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (clone := self.clone()) is not None:
            return self.run_clone(clone, args, kwargs)
        model = self._model
        if recording.is_recorded() or not torch.is_grad_enabled():
            return self.run_original(*args, **kwargs)
        if model.training is not self._training:
            output = self.run_original(*args, **kwargs)
            self.unplanned.called_in_other_mode(output)
            return output
        if (lazy := without_shape(model)) is not None:
            if first_rank():
                name = type(model).__name__
                tell(f"{name} runs once without a plan, as {lazy} has no shape yet; then it is planned")
            return self.run_original(*args, **kwargs)
        if not differentiates(model, args, kwargs):
            return self.run_original(*args, **kwargs)
        if (hindrance := hindering_mode()) is not None:
            self.unplanned.hindered_call(hindrance, END_IT)
            return self.run_original(*args, **kwargs)
        if self._given_up:
            return self.run_original(*args, **kwargs)
        if (made_up := next((n for n, p in model.named_parameters() if not p.is_leaf), None)) is not None:
            raise CaptureError(
                f"{made_up} is not the module's own parameter at its first training call but computed from "
                "others, as with torch.func.functional_call: plan the code that computes it as well, with "
                "planner.step around a function train_step(model, batch) that returns the loss"
            )
        try:
            made, planned = self._plan(args, kwargs)
        except SkippedStep:
            return self.run_original(*args, **kwargs)  # the next one is planned
        except CaptureError as error:
            if type(error) is not CaptureError:  # of arguments and functions that are no step
                raise
            self.unplanned.hindered_call(f"{type(model).__name__} cannot be planned ({error})", GIVEN_UP)
            if self.wanted.as_run is not None:
                self.wanted.as_run(model)
            output = self.run_original(*args, **kwargs)
            self._given_up = True  # only now: where the forward raises, the next batch may be a better one
            return output
        if self.wanted.options.accumulate is None:
            planned.when_accumulating = self._plan_again
        self._watch(planned)
        try:
            return planned(*args, **kwargs)
        finally:
            _tell(made, LOSS_OUTSIDE if NO_LOSS in made.plan.notes else "")

    def _plan_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanCall | None:
        """Plan again, for gradients that are there when a step begins."""
        try:
            made, planned = self._plan(args, kwargs)
        except SkippedStep:
            raise  # asked again at the next step
        except CaptureError as error:
            _warn_of_old_plan(error)
            return None
        _tell(made, "; planned again, as gradients are there already when a step begins")
        self._watch(planned)
        return planned

    def _watch(self, planned: PlanCall) -> None:
        """Have the module planned again when its parameters are larger, or frozen ones train."""
        if self.wanted.on_new_shape != "replan":
            return
        thawed, grown = Thawed(self._model), Grown(self._model)

        def why() -> str | None:
            if (taken := grown.now()) is not None:
                before, now = format_bytes(grown.planned_bytes), format_bytes(taken)
                return f"the parameters take {now} and took {before}"
            count = thawed.count()
            return f"{count} parameters train that were frozen" if count else None

        def plan_again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanCall | None:
            if (reason := why()) is None:
                return None
            try:
                made, replanned = self._plan(args, kwargs)
            except SkippedStep:
                return None
            except CaptureError as error:
                planned.when_changed = None  # not at every step
                _warn_of_old_plan(error)
                return None
            if self.wanted.options.accumulate is None:
                replanned.when_accumulating = self._plan_again
            self._watch(replanned)
            _tell(made, f"; planned again, as {reason}")
            return replanned

        planned.when_changed = plan_again

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Made, PlanCall]:
        model, wanted = self._model, self.wanted
        if wanted.enlarge is not None:
            args, kwargs = wanted.enlarge(args, kwargs)
        options = wanted.options
        countable = options.parallel is None and options.in_flight is None and options.backend != "inductor"
        if countable and not holds_dtensors(model) and (wrapped := wrapped_here()) is not None:
            wanted = replace(wanted, given={**wanted.given, "parallel": wrapped})

        def make() -> Made:
            step = read_step(
                model,
                args,
                kwargs,
                wanted.options.loss,
                wanted.options.outputs,
                of="the first training call",
            )
            return planned_or_cached(model, step, wanted)

        made = planned_by_rank_zero(model, make, wanted.options)
        check_fits(made.plan, model)
        planned = put_in(made.plan, model, on_new_shape=wanted.on_new_shape)
        planned.unplanned.planned_call()
        return made, planned

    def install_in(self, copied: torch.nn.Module) -> None:
        install(copied, PlannedAtFirstCall(copied, None, self.wanted))

    def pickled(self) -> tuple[Any, ...]:
        """How to restore it, with the options that can be pickled: no loss, optimizer or progress report."""
        given = self.wanted.given.copy()
        given.pop("loss", None)
        given.pop("optimizer", None)
        return unpickled, replace(self.wanted, given=given, progress=None)


def _warn_of_old_plan(error: CaptureError) -> None:
    """Warn that a step runs by the old plan, since it cannot be planned again."""
    warn(
        f"the module cannot be planned again ({error}): it trains by its old plan, and may exceed the "
        "budget. Follow that error's advice, or plan before training, with the inputs and parameters of now"
    )


def _tell(made: Made, end: str) -> None:
    if first_rank():
        tell(made.line() + end)


def install_lazily(model: torch.nn.Module, wanted: Wanted) -> None:
    """Have a module planned at its first training call."""
    call = PlannedAtFirstCall(model, take_out(model), wanted)
    install(model, call)
    call.unplanned.wait()


def unpickled(model: torch.nn.Module | None, wanted: Wanted) -> Companion:
    """Have an unpickled module planned at its first training call, as the pickled one would be."""
    if model is not None and not plans_are_off():
        install(model, PlannedAtFirstCall(model, None, wanted))
    return Companion(model)
