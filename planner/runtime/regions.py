"""The regions of a planned module while it trains."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.training_step.regions import Forward, set_boundaries, take_boundaries


class RunningRegions:
    """Submodules that run graphs of their own while the planned module's forward runs, and else as they are.

    Args:
        names: Their names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._forward: Forward | None = None

    def put_in(self, model: torch.nn.Module) -> None:
        """Install them in a module."""
        set_boundaries(model, self._names, lambda: self._forward)

    def take_out(self, model: torch.nn.Module) -> None:
        """Undo that."""
        take_boundaries(model, self._names)

    def during(self, whole: Callable[..., Any], region: Forward) -> Callable[..., Any]:
        """The compiled forward of the module, in which regions run ``region``."""
        if not self._names:
            return whole

        def run(*args: Any) -> Any:
            before, self._forward = self._forward, region
            try:
                return whole(*args)
            finally:
                self._forward = before

        return run
