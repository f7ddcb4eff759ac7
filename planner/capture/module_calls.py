"""Calls of a module while its step is captured: one marks its end in a recording, one is compiled."""

from collections.abc import Callable
from typing import Any

import torch

from planner._torch import modules
from planner.training_step.recorder import StepRecorder


def run_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function that Dynamo compiles, in planning and in training; the module's own hooks stay outside."""
    return module.forward(*args, **kwargs)


class Marked(torch.nn.Module):
    """A module's call that notes how many events a recorder has seen when it returns."""

    def __init__(self, module: torch.nn.Module, recorder: StepRecorder) -> None:
        super().__init__()
        self._target, self._recorder, self.events = [module], recorder, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._target[0](*args, **kwargs)
        self.events = len(self._recorder.recording.events)
        return output


class Bound(torch.nn.Module):
    """The compiled call of a module, as an ``nn.Module``."""

    def __init__(self, compiled: Callable[..., Any], module: torch.nn.Module) -> None:
        super().__init__()
        self._compiled = compiled
        self._target = [module]  # in a list: not a submodule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._target[0]
        return modules.call_with_forward(module, lambda *a, **k: self._compiled(module, a, k), args, kwargs)
