"""A clock that runs slowly, so that time limits of solvers do not depend on the machine's load."""

import time
from typing import Any

NO_HURRY = 10.0
"""Seconds of the machine for one of this clock."""


class SlowClock:
    """Stands for Python's module `time`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def perf_counter() -> float:
        return time.perf_counter() / NO_HURRY

    @staticmethod
    def process_time() -> float:
        return time.process_time() / NO_HURRY
