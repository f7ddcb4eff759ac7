"""How long operations take on the device at hand, each distinct one timed once.

On the CPU it is process time, all threads together, and what other processes do does not count; on CUDA the
time between two events on the device, so that the time to launch counts only where it is the bound. Answers
are kept in memory and on disk, in nanoseconds, by operator, shapes, strides, dtypes and environment.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from planner._torch.execution.allocator_events import occupy
from planner._torch.execution.plain_execution import plain_execution
from planner.costs.measurement_cache import (
    call_signature,
    default_cache_path,
    environment,
    read_entries,
    write_entries,
)
from planner.costs.roofline import Roofline
from planner.costs.workspace import WorkspaceMeter
from planner.training_step.call import Call

logger = logging.getLogger(__name__)

OnTimed = Callable[[int, str], None]
"""Called with how many operations have been timed, and the name of the next."""

REPEATS = 5
LEAST_SECONDS = 1e-3
"""A repeat runs an operation as often as it takes to last so long."""
MOST_RUNS = 1000
WAIT_SECONDS = 5e-3
"""How long a CUDA device is kept busy while what is timed is launched."""


class MeasuredCosts:
    """Measured seconds of operations; the roofline's where an operation cannot be run.

    Attributes:
        name: What a plan says it used.
        failures: Operations that could not be timed, with the reason, by signature.
    """

    name = "measured"

    def __init__(
        self,
        meter: WorkspaceMeter,
        roofline: Roofline,
        cache_path: Path | str | None = "default",
        progress: OnTimed | None = None,
    ) -> None:
        """
        Args:
            meter: Makes real arguments, on the device at hand.
            roofline: Says what is free, and is used where an operation cannot be run.
            cache_path: JSON file that remembers; ``"default"`` is one in the user's cache directory.
            progress: Called before each operation that is timed.
        """
        self.failures: dict[str, str] = {}
        self._meter, self._roofline, self._progress = meter, roofline, progress
        if cache_path == "default":
            cache_path = default_cache_path().with_name("seconds.json")
        self._path = None if cache_path is None else Path(cache_path)
        self._environment = environment(meter.device)
        self._known = {
            key: numbers[0] * 1e-9 for key, numbers in read_entries(self._path, self._environment).items()
        }
        self._new: dict[str, float] = {}

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> float:
        """Seconds of one operation; runs it, several times, where they are not known yet."""
        predicted = self._roofline.seconds(func, args, kwargs, outputs)
        if predicted == 0.0:
            return 0.0
        try:
            key = call_signature(func, args, kwargs)
        except (TypeError, ValueError) as error:
            self.failures[str(func)] = str(error)
            return predicted
        if key not in self._known and key not in self.failures:
            if self._progress is not None:
                self._progress(len(self._new), str(func))
            try:
                self._known[key] = self._new[key] = self._timed(Call(func, args, kwargs))
            except Exception as error:  # whatever a kernel says about inputs that were made up
                logger.debug("no time known for %s: %s", key, error)
                self.failures[key] = f"{type(error).__name__}: {error}"
        return self._known.get(key, predicted)

    def save(self) -> None:
        """Remember on disk what was timed."""
        write_entries(self._path, self._environment, {key: [round(s * 1e9)] for key, s in self._new.items()})
        self._new = {}

    # ---- timing ------------------------------------------------------------------------------------

    def _timed(self, call: Call) -> float:
        device = self._meter.device
        with self._as_in_training(), self._meter.arguments(call) as (args, kwargs):

            def run(times: int) -> float:
                start, end = _clock(device)
                before = start()
                for _ in range(times):
                    call.func(*args, **kwargs)
                return end() - before

            run(1)  # what is set up on a first call
            once = max(run(1), 1e-9)
            times = max(1, min(MOST_RUNS, round(LEAST_SECONDS / once)))
            return statistics.median(run(times) for _ in range(REPEATS)) / times

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        device = self._meter.device
        cuda = [device] if device.type == "cuda" else []
        with plain_execution(device.type), torch.random.fork_rng(devices=cuda):
            if device.type == "cuda":
                with torch.cuda.device(device):
                    yield
            else:
                yield


def _clock(device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that tell the seconds at the start and at the end of what is timed."""
    if device.type != "cuda":
        return time.process_time, time.process_time
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start() -> float:
        torch.cuda.synchronize(device)
        # An idle device would wait for every small kernel to be launched, and that would be what is timed.
        occupy(WAIT_SECONDS)
        first.record()
        return 0.0

    def end() -> float:
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) * 1e-3

    return start, end
