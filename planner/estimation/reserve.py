"""The public function reserve: an unplanned training run that reserves no more than it allocates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from planner.estimation.estimate import prepared_step
from planner.planfile.schema import WholeStep
from planner.planning.options import StepKeywords, shows_options
from planner.progress import Progress
from planner.report.text import reserved_beforehand
from planner.runtime.arena import Arena
from planner.training_step.inputs import Inputs, check_model


class Reserving:
    """A hook of a module that reserves the arena before each training step."""

    def __init__(self, arena: Arena, training: bool) -> None:
        self._arena, self._training = arena, training

    def __call__(self, model: torch.nn.Module, _args: Any) -> None:
        if model.training == self._training and torch.is_grad_enabled():
            self._arena.before_step(model)


@dataclass(frozen=True)
class Reserved:
    """The result of :func:`reserve`.

    Attributes:
        before, after: The predicted whole step without the reserved segments and with them.
    """

    before: WholeStep
    after: WholeStep
    _handle: torch.utils.hooks.RemovableHandle

    def remove(self) -> None:
        """Reserve nothing from now on; what is reserved stays until ``torch.cuda.empty_cache()``."""
        self._handle.remove()

    def __str__(self) -> str:
        if not self.after.arena:
            return "nothing is reserved beforehand"
        return reserved_beforehand(self.after.arena, self.before.reserved_bytes, self.after.reserved_bytes)


@shows_options(StepKeywords)
def reserve(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[StepKeywords],
) -> Reserved:
    """Have the caching allocator of a GPU reserve what a training step needs before it begins.

    Training goes on as it is, without a plan: nothing is computed again. The allocator takes memory of the
    device as requests come, and what later requests cannot use of it is lost; from the first training step on
    it has what all of the step's requests fit into. Planned modules do so by themselves.

    Args:
        model, args, kwargs: As for :func:`planner.plan`. Nothing is run.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Returns:
        What that saves; ``.remove()`` undoes it. On the CPU nothing is done.

    Raises:
        CaptureError, InputError: As :func:`planner.plan` does.
    """
    check_model(model)
    prepared = prepared_step("reserve", model, args, kwargs, progress, options)
    after = prepared.reserving_whole_step
    hook = Reserving(Arena.of(after, prepared.resident), prepared.step.in_mode(model))
    handle = model.register_forward_pre_hook(hook)
    return Reserved(prepared.baseline_whole_step, after, handle)
