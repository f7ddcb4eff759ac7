"""In capture, gradients arrive at weights with hooks in the order in which the planned module runs them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from planner.hooks.arrival_order import ArrivalOrder


class RecordedArrivalOrder(ArrivalOrder):
    """The planned module's hook for that order; unrecorded, since it takes neither memory nor time.

    Args:
        pause: Makes a context in which operations run unrecorded.
    """

    def __init__(self, pause: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._pause = pause

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        with self._pause():
            return super().arguments(args)
