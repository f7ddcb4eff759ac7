"""Steps of a module with its plan and without it, each from the same state."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from planner._torch import modules
from planner._torch.cuda.recurrent_state import make_dropout_states
from planner.capture.carried_history import is_of_carried_history
from planner.progress import Progress
from planner.runtime.installed import InstalledCall
from planner.runtime.plan_call import PlanCall
from planner.training_step.snapshot import StepSnapshot
from planner.training_step.step import Step
from planner.verification.measure import MemoryMeasurement, measure_peak, time_steps
from planner.verification.outcomes import Outcome


class ComparedSteps:
    """Runs steps, planned and unplanned, and puts the state back before each.

    The stages follow each other: :meth:`begin`, :meth:`reference`, any number of :meth:`outcome`,
    :meth:`peaks`, :meth:`times`, and at the end, whatever happened, :meth:`put_back`.

    Args:
        model, step: The module and its step.
        adding_to: The parameters that have gradients when a step begins.
        outcomes: How many outcomes are asked for, for ``report`` to say how far they are.
        repeats: How many steps of each kind are timed.
        report: Called with what is being done, and how much of all is done.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: Step,
        adding_to: Sequence[torch.nn.Parameter],
        *,
        outcomes: int,
        repeats: int,
        report: Progress,
    ) -> None:
        self._model, self._step, self._adding_to = model, step, adding_to
        self._report, self._repeats = report, repeats
        self._outcomes, self._taken = outcomes, 0
        self._stages = outcomes + 3 + 2 * (repeats + 1)
        self._before = StepSnapshot.take(model, step, "module")
        inputs = replace(step, loss=None)
        self._inputs = StepSnapshot.take(torch.nn.Module(), inputs, "module", earlier=self._before)
        self._state = self._before
        self._carries_history = False
        found = modules.installed_call(model)
        self._installed = found
        self._unplanned = found.previous if isinstance(found, InstalledCall) else found
        self._waiting = isinstance(found, InstalledCall) and found.unplanned.waiting
        self._planned: PlanCall | None = None

    def begin(self, planned: PlanCall) -> None:
        """Run one unplanned step: what a first forward leaves, as caches, is in the state of all others.

        Args:
            planned: The call that runs by the plan.
        """
        self._planned = planned
        self._before.restore()
        self._before.drop_gradients()
        modules.install_call(self._model, self._unplanned)
        self._report("running the unplanned step", 0.0)
        self._step.run(self._model)
        self._before.drop_gradients()
        self._inputs.restore()  # each step of training has its own
        self._before.generators.restore()  # a path that random numbers decide is then the planned one
        self._note_state()

    def _note_state(self) -> None:
        self._state = StepSnapshot.take(self._model, self._step, "module", earlier=self._before)

    def reference(self) -> Outcome:
        """The outcome of an unplanned step.

        If a step differentiates through results of the one before, each step begins with that history.
        """
        try:
            return self.outcome(planned=False)
        except RuntimeError as error:
            if not is_of_carried_history(error):
                raise
        self._carries_history = True
        self.restore()
        self._before.python.put_back_history()
        self._note_state()
        return self.outcome(planned=False)

    def outcome(self, *, planned: bool) -> Outcome:
        """The outcome of one more step."""
        self._taken += 1
        self.tell(f"comparing: running the {_side(planned)} step")
        self.restore()
        self._put(planned)
        return Outcome(self._model, self._step, self._state.python.generators)

    def tell(self, text: str) -> None:
        """Say what is being done between two outcomes."""
        self._report(text, min(self._taken, self._outcomes) / self._stages)

    def peaks(self, device: torch.device) -> tuple[MemoryMeasurement, MemoryMeasurement]:
        """The measured memory of an unplanned step, and of a planned one."""
        measured = []
        for planned in (False, True):
            done = (self._outcomes + 1 + planned) / self._stages
            self._report(f"measuring the peak of the {_side(planned)} step", done)
            self.restore()
            measured.append(measure_peak(self._runner(planned), device))
        return measured[0], measured[1]

    def times(self, device: torch.device) -> tuple[list[float], list[float]]:
        """The seconds of unplanned steps, and of planned ones, in turn."""
        if not self._repeats:
            return [], []
        self.restore()

        def tell(index: int) -> None:
            done = 1 - 2 * (self._repeats - index) / self._stages
            self._report(f"timing pair {index + 1} of {self._repeats}", done)

        timed = [self._runner(planned, without_gradients=True) for planned in (False, True)]
        seconds = time_steps(timed, self._repeats, device=device, before=tell)
        return seconds[0], seconds[1]

    def restore(self) -> None:
        """Put back the state from which each step begins."""
        torch.clear_autocast_cache()  # in training each step is in an autocast region of its own
        self._state.restore()
        self._state.drop_gradients()
        make_dropout_states(self._model)
        for parameter in self._adding_to:
            parameter.grad = torch.zeros_like(parameter)

    def put_back(self) -> None:
        """Leave everything as it was before the first step."""
        self._before.restore()
        modules.install_call(self._model, self._installed)
        if isinstance(self._installed, InstalledCall):
            self._installed.reinstate(waiting=self._waiting)

    def _put(self, planned: bool) -> None:
        if planned:
            assert self._planned is not None
            self._planned.put_back_in()  # restoring attributes has removed its regions
        else:
            modules.install_call(self._model, self._unplanned)

    def _runner(self, planned: bool, *, without_gradients: bool = False) -> Callable[[], object]:
        def run() -> object:
            if without_gradients:
                self._model.zero_grad(set_to_none=True)
            self._put(planned)
            if self._carries_history:
                self._before.python.put_back_history()
            return self._step.run(self._model)

        return run


def _side(planned: bool) -> str:
    return "planned" if planned else "unplanned"
