"""Measuring a step: its exact peak of memory, and its time."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from planner._torch.execution.allocator_events import (
    held_on_cuda,
    profiler_is_active,
    record_cpu_allocations,
)
from planner.costs.devices import CUDA_ROUNDING_BYTES
from planner.errors import PlannerError


class MeasurementError(PlannerError):
    """Memory cannot be measured here and now."""


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """Bytes that a step allocated beyond those that were there when it began.

    Attributes:
        peak_bytes: The most at any time.
        final_bytes: The bytes when it returned, its return value included. Negative where it freed more than
            it left.
        unsplit_bytes: How much more the peak of ``torch.cuda.max_memory_allocated`` is. It counts whole
            blocks, from which the caching allocator does not always split off the rest (up to 1 MiB each,
            unless segments are expandable). 0 on the CPU.
    """

    peak_bytes: int
    final_bytes: int
    unsplit_bytes: int = 0


def measure_peak(step: Callable[[], object], device: torch.device | str) -> MemoryMeasurement:
    """Run a step once and measure the memory that it allocates.

    The figures are exact and count workspace. They come from the allocator's own events: on the CPU from the
    profiler, on CUDA from the caching allocator's history, each block rounded up to 512 bytes. Where somebody
    records that history already, they are ``max_memory_allocated``'s.

    Args:
        step: The step. Its return value is held until the measurement ends. Run the step once before: first
            calls fill caches.
        device: The device whose memory is measured: ``"cpu"`` or a CUDA device.

    Raises:
        MeasurementError: a profiler session is open (on the CPU), or the device is of another type.
    """
    device = torch.device(device)
    gc.collect()  # garbage of earlier steps must not be freed inside this one
    if device.type == "cuda":
        return _peak_on_cuda(step, device)
    if device.type != "cpu":
        raise MeasurementError(f"memory can be measured on cpu and cuda, not on {device.type!r}")
    if profiler_is_active():
        raise MeasurementError("a torch.profiler session is open: close it before memory is measured")
    recording = record_cpu_allocations(step)
    running = peak = 0
    for _, count in recording.allocations:
        running += count
        peak = max(peak, running)
    return MemoryMeasurement(peak, running)


def _peak_on_cuda(step: Callable[[], object], device: torch.device) -> MemoryMeasurement:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    peak, final = held_on_cuda(step, device, CUDA_ROUNDING_BYTES)
    counted = torch.cuda.max_memory_allocated(device) - before
    return MemoryMeasurement(peak, final, max(counted - peak, 0))


def measure_seconds(
    steps: Sequence[Callable[[], object]], repeats: int = 5, *, device: torch.device | str = "cpu"
) -> list[float]:
    """Time steps against each other, interleaved, so that a disturbance affects all of them.

    Args:
        steps: The steps. Each is run once before, untimed.
        repeats: How often each is timed.
        device: On the CPU the time of this process counts, all threads together; other processes do not
            disturb it. On CUDA it is wall time, from an idle device to an idle device.

    Returns:
        The median seconds of each step.
    """
    return [statistics.median(taken) for taken in time_steps(steps, repeats, device=device)]


def time_steps(
    steps: Sequence[Callable[[], object]],
    repeats: int,
    *,
    device: torch.device | str = "cpu",
    before: Callable[[int], object] | None = None,
) -> list[list[float]]:
    """Seconds of every run of each step, as :func:`measure_seconds` takes them.

    Args:
        before: Called with the number of each round, from 0, before it is timed.
    """
    device = torch.device(device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()
    for index in range(repeats):
        if before is not None:
            before(index)
        for taken, step in zip(seconds, steps, strict=True):
            _wait_for(device)
            start = clock()
            held = step()
            _wait_for(device)
            taken.append(clock() - start)
            del held
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
