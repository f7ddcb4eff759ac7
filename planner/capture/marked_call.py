"""A module's call, marked in a recording."""

from typing import Any

import torch

from planner.training_step.recorder import StepRecorder


class Marked(torch.nn.Module):
    """A module's call that notes how many events a recorder has seen when it returns."""

    def __init__(self, module: torch.nn.Module, recorder: StepRecorder) -> None:
        super().__init__()
        self._target, self._recorder, self.events = [module], recorder, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._target[0](*args, **kwargs)
        self.events = len(self._recorder.recording.events)
        return output
