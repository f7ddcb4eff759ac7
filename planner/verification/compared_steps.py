"""The steps that verification compares: with the plan and without it, each from the same state."""

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
    """Runs planned and unplanned steps, and restores the same state before each.

    Call the methods in this order: :meth:`begin`, :meth:`reference`, any number of :meth:`outcome`,
    :meth:`peaks`, :meth:`times`, and at the end, also after an error, :meth:`put_back`.

    Args:
        model, step: The module and its step.
        with_gradients: The parameters that have gradients, of zeros, when a step begins.
        outcomes: How many outcomes the caller expects to ask for; ``report`` gets a share of these.
        repeats: How many steps of each kind are timed.
        report: Called with the name of a stage, and the share of all stages that is done.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: Step,
        with_gradients: Sequence[torch.nn.Parameter],
        *,
        outcomes: int,
        repeats: int,
        report: Progress,
    ) -> None:
        self._model, self._step, self._with_gradients = model, step, with_gradients
        self._report, self._repeats = report, repeats
        self._outcomes, self._compared = outcomes, 0
        # The first step, the outcomes, two steps for peaks, and the timed pairs after one that is not timed.
        self._stages = outcomes + 3 + 2 * (repeats + 1)
        self._before = StepSnapshot.take(model, step, "module")
        inputs = replace(step, loss=None)
        self._inputs = StepSnapshot.take(torch.nn.Module(), inputs, "module", earlier=self._before)
        self._state = self._before  # from which each step begins; `begin` takes it anew
        self._carries_history = False  # whether a step differentiates through results of the one before
        installed = modules.installed_call(model)
        self._installed = installed
        self._unplanned = installed.previous if isinstance(installed, InstalledCall) else installed
        self._waiting = isinstance(installed, InstalledCall) and installed.unplanned.waiting
        self._planned: PlanCall | None = None

    def begin(self, planned: PlanCall) -> None:
        """Run one unplanned step, and take the state that all other steps begin from.

        So that state has the caches, and other attributes, that a module sets in its first forward.

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
        # A step may write to its inputs, and each step of training gets new ones. Random generators are put
        # back too: a path that they decide is then the planned one.
        self._inputs.restore()
        self._note_state()

    def _note_state(self) -> None:
        self._state = StepSnapshot.take(self._model, self._step, "module", earlier=self._before)

    def reference(self) -> Outcome:
        """The outcome of an unplanned step.

        A step may differentiate through results of the one before, which a restored state lacks: it raises.
        Then each step begins with the autograd history that was there before the first.
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
        """Run one more step, and return its outcome."""
        self._compared += 1
        self.tell(f"comparing: running the {_side(planned)} step")
        self.restore()
        self._install(planned)
        return Outcome(self._model, self._step, self._state.python.generators)

    def tell(self, text: str) -> None:
        """Report what runs between two outcomes."""
        self._report(text, min(self._compared, self._outcomes) / self._stages)

    def peaks(self, device: torch.device) -> tuple[MemoryMeasurement, MemoryMeasurement]:
        """Measure the memory of an unplanned step, and of a planned one."""
        measured = []
        for planned in (False, True):
            done = (self._outcomes + 1 + planned) / self._stages
            self._report(f"measuring the peak of the {_side(planned)} step", done)
            self.restore()
            measured.append(measure_peak(self._runner(planned), device))
        return measured[0], measured[1]

    def times(self, device: torch.device) -> tuple[list[float], list[float]]:
        """Time unplanned and planned steps in turn; the seconds of the unplanned ones, and of the planned."""
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
        for parameter in self._with_gradients:
            parameter.grad = torch.zeros_like(parameter)

    def put_back(self) -> None:
        """Restore all as it was before the first step."""
        self._before.restore()
        modules.install_call(self._model, self._installed)
        if isinstance(self._installed, InstalledCall):
            self._installed.reinstate(waiting=self._waiting)

    def _install(self, planned: bool) -> None:
        if planned:
            assert self._planned is not None
            self._planned.reinstall()  # `restore` removed its regions, which are attributes of submodules
        else:
            modules.install_call(self._model, self._unplanned)

    def _runner(self, planned: bool, *, without_gradients: bool = False) -> Callable[[], object]:
        def run() -> object:
            if without_gradients:
                self._model.zero_grad(set_to_none=True)
            self._install(planned)
            if self._carries_history:
                self._before.python.put_back_history()
            return self._step.run(self._model)

        return run


def _side(planned: bool) -> str:
    return "planned" if planned else "unplanned"
