"""Measure memory, and run operators alone to do so."""

import bisect
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class CpuRecording:
    """Events of the CPU allocator while a function ran.

    Attributes:
        allocations: Nanosecond and bytes of each event, in order; a free has negative bytes. Only blocks
            allocated during the recording appear: the allocator's table of sizes knows nothing, or
            something outdated, of the others.
        marks: First and last nanosecond of each ``record_function`` range, by name.
    """

    allocations: list[tuple[int, int]]
    marks: dict[str, tuple[int, int]]

    def allocations_between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The events from nanosecond `first` to `last`."""
        start = bisect.bisect_left(self.allocations, first, key=lambda event: event[0])
        end = bisect.bisect_right(self.allocations, last, key=lambda event: event[0])
        return self.allocations[start:end]


def profiler_is_active() -> bool:
    """Whether a profiler session is open; a second one would end it."""
    return bool(torch._C._autograd._profiler_enabled())


def record_cpu_allocations(step: Callable[[], object]) -> CpuRecording:
    """Run a function and record every event of the CPU allocator; its result lives until the end.

    The profiler's own event list shows no addresses; its tree of raw events, which does, is private.
    """
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with _quiet_profiler(), torch.profiler.profile(activities=only_cpu, profile_memory=True) as session:
        held = step()
    del held
    profiler: Any = session.profiler
    allocation = torch._C._profiler._EventType.Allocation
    events: list[tuple[int, int, int]] = []
    marks = {}
    nodes = list(profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        kind, fields = node.typed
        if kind != allocation:
            if "::" not in node.name:
                marks[node.name] = (node.start_time_ns, node.end_time_ns)
        elif fields.device.type == "cpu":
            events.append((node.start_time_ns, fields.alloc_size, fields.ptr))
    return CpuRecording(_of_own_blocks(sorted(events, key=lambda event: event[0])), marks)


def _of_own_blocks(events: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Events in order, without the frees of blocks that none of them allocated."""
    live: dict[int, int] = {}
    kept = []
    for moment, count, address in events:
        if count >= 0:
            live[address] = count
        elif live.pop(address, None) is None:
            continue
        kept.append((moment, count))
    return kept


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """At its first start the profiler can be set not to write two lines to standard error per session."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)


def held_on_cuda(run: Callable[[], object], device: torch.device, rounding_bytes: int) -> tuple[int, int]:
    """The most bytes that a function holds at once, and those that it leaves, in blocks of the asked size.

    They come from the history of the caching allocator. What PyTorch counts as allocated has more: a block
    from which up to 1 MiB is left over is not split, which depends on what there was before. Where such a
    history is being recorded already, it goes on, and these are PyTorch's counts.

    Args:
        run: The function, which is run once. Its result lives until the end.
        device: The device whose allocator counts.
        rounding_bytes: Each block is rounded up to a multiple of this.
    """
    if torch._C._cuda_isHistoryEnabled():
        return counted_on_cuda(run, device)
    index = torch.cuda.current_device() if device.index is None else device.index
    memory = torch.cuda.memory
    torch.cuda.synchronize(index)
    memory._record_memory_history(context=None)
    try:
        held = run()
        torch.cuda.synchronize(index)  # what goes wrong in a kernel shows here
        events = memory._snapshot(index)["device_traces"][index]
    finally:
        memory._record_memory_history(enabled=None)
    del held
    net = peak = 0
    for event in events:
        block = -(-event["size"] // rounding_bytes) * rounding_bytes
        if event["action"] == "alloc":
            net += block
            peak = max(peak, net)
        elif event["action"] == "free_completed":
            net -= block
    return peak, net


def counted_on_cuda(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """The most bytes that a function holds at once, and those that it leaves, as PyTorch counts them.

    Args:
        run, device: As for :func:`held_on_cuda`.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    held = run()
    after, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.synchronize(device)  # what goes wrong in a kernel shows here
    del held
    return most - before, after - before


def occupy(seconds: float) -> None:
    """Keep the current CUDA device busy for about so long; returns at once."""
    torch.cuda._sleep(int(seconds * 2e9))  # in cycles of a clock of 1 to 2 GHz
