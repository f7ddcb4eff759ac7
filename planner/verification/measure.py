"""Measures a step's exact peak of memory, and the time of several steps."""

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
    """Memory cannot be measured on this device, or not while a profiler session is open."""


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """Bytes that a step allocated beyond those that were there when it began.

    Attributes:
        peak_bytes: The most at any time.
        final_bytes: The bytes when it returned, its return value included. Negative where it freed more than
            it left.
        unsplit_bytes: The difference from ``peak_bytes`` to ``torch.cuda.max_memory_allocated``, which counts
            whole blocks. A block may be up to 1 MiB larger than the request, as the caching allocator does
            not split off a smaller rest (unless segments are expandable). 0 on the CPU.
    """

    peak_bytes: int
    final_bytes: int
    unsplit_bytes: int = 0


def measure_peak(step: Callable[[], object], device: torch.device | str) -> MemoryMeasurement:
    """Run a step once and measure the memory that it allocates.

    The figures are exact and count workspace. They come from the allocator's own events: on the CPU from the
    profiler, on CUDA from the caching allocator's history, each request rounded up to 512 bytes. If that
    history is being recorded already (``torch.cuda.memory._record_memory_history``), the figures come from
    PyTorch's counters, such as ``max_memory_allocated``, and count whole blocks.

    Args:
        step: The step. Its return value is held until the measurement ends. Run the step once before: first
            calls fill caches.
        device: The device whose memory is measured: ``"cpu"`` or a CUDA device.

    Raises:
        MeasurementError: The device is neither, or it is the CPU and a profiler session is open.
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
    """Time steps in turn, round after round, so that a disturbance affects all of them alike.

    Args:
        steps: The steps. Each is run once before, untimed.
        repeats: How often each is timed.
        device: On the CPU the processor time of all threads of this process counts, which other processes
            do not disturb. On CUDA it is wall time; the device is idle before each run and after it.

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
    """Time steps as :func:`measure_seconds` does.

    Args:
        steps, repeats, device: As there.
        before: Called, untimed, before each round with its number, from 0.

    Returns:
        For each step the seconds of all its runs.
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
            del held  # freed after the clock was read
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
