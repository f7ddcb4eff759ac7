"""Times operations on the device at hand, each distinct one once.

On the CPU the time is process time, all threads together; other processes do not count. An operation that
runs over and over finds its inputs in the cache, but in a step other operations have replaced them there. So
other memory is read before each run: as much as the step has, at most as much as the cache holds. The least
time of several runs counts, as the setup of a first run, and other processes that use the memory, only add to
it.

On CUDA the time is that between two events on the device: launches count only if they are the bound.
Times are kept in memory and on disk, in nanoseconds, by operator, shapes, strides, dtypes and environment.
"""

import logging
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Called with the number of operations that have been timed, and the name of the next."""

REPEATS = 3
ENOUGH_SECONDS = 0.05
"""An operation that has run this long is not repeated again."""
LEAST_SECONDS = 1e-3
"""On CUDA each repeat runs an operation as many times as take this long."""
MOST_RUNS = 1000
LAST_LEVEL_CACHE = 32 * 2**20
"""Bytes of a CPU's last-level cache, if the system does not tell."""
WAIT_SECONDS = 5e-3
"""The time for which a CUDA device is kept busy while the timed operations are launched."""


class MeasuredCosts:
    """Measured seconds of operations; the roofline's where an operation cannot be run.

    Attributes:
        name: The name of these costs in a plan.
        failures: Operations that could not be timed, with the reason, by signature.
        left_out: By signature: seconds of operations that were not timed, as the time for timing was used up.
            They are the roofline's times a factor, by which the timed operations, those of the same operator
            if there are any, took longer than their rooflines.
    """

    name = "measured"

    def __init__(
        self,
        meter: WorkspaceMeter,
        roofline: Roofline,
        cache_path: Path | str | None = "default",
        progress: OnTimed | None = None,
        step_bytes: int | None = None,
        most_seconds: float = math.inf,
    ) -> None:
        """
        Args:
            meter: Makes real arguments, on the device at hand.
            roofline: Says which operations are free, and gives the seconds of those that cannot be run.
            most_seconds: The time for timing; after it new operations have seconds by the roofline.
            step_bytes: Bytes that the step holds; None for more than a cache.
            cache_path: JSON file to keep times in; ``"default"`` is one in the user's cache directory.
            progress: Called before each operation that is timed.
        """
        self.failures: dict[str, str] = {}
        self.left_out: dict[str, float] = {}
        # By operator, and None for all: by signature, as many times as long as by the roofline.
        self._of_roofline = defaultdict[object, dict[str, float]](dict)
        self._meter, self._roofline, self._progress = meter, roofline, progress
        self._seconds_left = most_seconds
        if cache_path == "default":
            cache_path = default_cache_path().with_name("seconds.json")
        self._path = None if cache_path is None else Path(cache_path)
        self._environment = environment(meter.device)
        self._between = _read_between(meter.device, step_bytes)
        self._memory: torch.Tensor | None = None
        if self._between:
            self._environment += f"; {self._between} bytes between two runs"
        self._known = {
            key: numbers[0] * 1e-9 for key, numbers in read_entries(self._path, self._environment).items()
        }
        self._new: dict[str, int] = {}

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> float:
        """Seconds of one operation; runs it several times if they are not known yet."""
        predicted = self._roofline.seconds(func, args, kwargs, outputs)
        if predicted == 0.0:
            return 0.0
        try:
            key = call_signature(func, args, kwargs)
        except (TypeError, ValueError) as error:
            self.failures[str(func)] = str(error)
            return predicted
        if key not in self._known and key not in self.failures:
            if key in self.left_out or self._seconds_left <= 0.0:
                timed = self._of_roofline.get(func) or self._of_roofline[None] or {key: 1.0}
                return self.left_out.setdefault(key, predicted * statistics.median(timed.values()))
            before = time.process_time()
            if self._progress is not None:
                self._progress(len(self._new), str(func))
            try:
                # In whole nanoseconds, as the file keeps them: so the next plan uses the same times.
                taken = round(self._timed(Call(func, args, kwargs)) * 1e9)
                self._known[key], self._new[key] = taken * 1e-9, taken
            except Exception as error:  # a kernel may raise anything about made-up inputs
                logger.debug("no time known for %s: %s", key, error)
                self.failures[key] = f"{type(error).__name__}: {error}"
            self._seconds_left -= time.process_time() - before
        seconds = self._known.get(key, predicted)
        for operator in (func, None):
            self._of_roofline[operator][key] = seconds / predicted
        return seconds

    def allow(self, seconds: float) -> None:
        """Time operations that are new from now on for so long, or longer."""
        self._seconds_left = max(self._seconds_left, seconds)

    def time_largest_first(self, calls: Iterable[Call], outputs: Iterable[object]) -> None:
        """Time the operations of a step, the longest by the roofline first, until the time is used up."""
        both = list(zip(calls, outputs, strict=True))
        of_each = [self._roofline.seconds(c.func, c.args, c.kwargs, output) for c, output in both]
        for place in sorted(range(len(both)), key=of_each.__getitem__, reverse=True):
            if of_each[place] == 0.0 or self._seconds_left <= 0.0:
                return
            call, output = both[place]
            self.seconds(call.func, call.args, call.kwargs, output)

    def save(self) -> None:
        """Keep the new times on disk, and no memory that operations were timed with."""
        self._meter.made_up.let_go()
        self._memory = None
        write_entries(self._path, self._environment, {key: [timed] for key, timed in self._new.items()})
        self._new = {}

    # ---- timing ------------------------------------------------------------------------------------

    def _timed(self, call: Call) -> float:
        device, first = self._meter.device, self._meter.run_of(call)
        if first is not None and first.alone and first.seconds >= ENOUGH_SECONDS:
            return first.seconds
        with self._as_in_training(), self._meter.arguments(call) as (args, kwargs):

            def run() -> object:
                return call.func(*args, **kwargs)

            if device.type == "cuda":
                run()  # a first call sets things up
                return _device_seconds(device, run)
            if self._memory is None:
                self._memory = torch.zeros(self._between // 4, device="cpu")
            return _process_seconds(run, self._memory, [] if first is None else [first.seconds])

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


def _process_seconds(run: Callable[[], object], memory: torch.Tensor, first: Sequence[float]) -> float:
    """Least process time of a run, before each of which some memory is read; ``first``: of earlier runs."""
    seconds = [*first]
    while len(seconds) < 2 or (len(seconds) <= REPEATS and sum(seconds) < ENOUGH_SECONDS):
        memory.sum()
        before = time.process_time()
        result = run()
        seconds.append(time.process_time() - before)
        del result
    return min(seconds)


def _device_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of a run on a CUDA device."""

    def runs(times: int) -> float:
        start, end = _clock(device)
        before = start()
        for _ in range(times):
            run()
        return end() - before

    once = max(runs(1), 1e-9)
    times = max(1, min(MOST_RUNS, round(LEAST_SECONDS / once)))
    return statistics.median(runs(times) for _ in range(REPEATS)) / times


def _read_between(device: torch.device, step_bytes: int | None) -> int:
    """The bytes to read between two runs: the step's, as a power of two, at most the last cache."""
    if device.type != "cpu":
        return 0
    name = "SC_LEVEL3_CACHE_SIZE"
    cache = os.sysconf(name) if name in getattr(os, "sysconf_names", ()) else 0
    most = cache or LAST_LEVEL_CACHE
    return most if step_bytes is None else min(most, 1 << max(step_bytes - 1, 0).bit_length())


def _clock(device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that read a CUDA device's clock, in seconds, at the start and at the end of a timed run."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start() -> float:
        torch.cuda.synchronize(device)
        # On an idle device small kernels would run as they are launched, and the time would be the launches'.
        occupy(WAIT_SECONDS)
        first.record()
        return 0.0

    def end() -> float:
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) * 1e-3

    return start, end
