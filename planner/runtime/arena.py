"""Keeping an arena: segments that the caching allocator of a GPU is to hold before a step begins."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from planner.allocator.settings import AllocatorSettings, SettingsError
from planner.errors import warn
from planner.planfile.budget import format_bytes
from planner.planfile.schema import Resident, WholeStep

Segments = Sequence[tuple[int, int]]
"""Address and bytes of each segment."""


class Memory(Protocol):
    """The caching allocator of one device, as far as an arena needs it."""

    def has_arena(self) -> bool:
        """Whether it is PyTorch's, and its settings let requests be cut out of segments that are reserved
        beforehand. Nothing else is asked of it where it is not."""

    def frees(self) -> int:
        """How often it has given a segment back to the device."""

    def allocated_bytes(self) -> int:
        """The bytes in use."""

    def segments(self) -> Segments:
        """The segments that it has reserved."""

    def allocate(self, size: int) -> Any:
        """A tensor of so many bytes, or a stand-in for one."""

    def empty_cache(self) -> None:
        """Give unused segments back to the device."""

    def peak_bytes(self) -> int:
        """The most that was in use."""

    def forget_peak(self) -> None:
        """Count the most that is in use from now on."""


@dataclass(frozen=True)
class CudaMemory:
    """The allocator of a GPU. Reading one number of it takes some microseconds; a list of its segments
    milliseconds."""

    device: torch.device

    def has_arena(self) -> bool:
        if torch.cuda.get_allocator_backend() != "native":  # one of the user's counts nothing
            return False
        conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        try:
            settings = AllocatorSettings.parse(conf)
        except SettingsError:  # another allocator, or settings of a later PyTorch
            return False
        return not settings.expandable_segments and settings.max_split_bytes is None

    def frees(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.device)["num_device_free"])

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def segments(self) -> Segments:
        found = torch.cuda.memory_snapshot()
        return [(s["address"], s["total_size"]) for s in found if s["device"] == self.device.index]

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass
class Arena:
    """Sees to it that segments are reserved.

    Attributes:
        sizes: Bytes of each segment.
        there_bytes: Bytes in use when the first step begins, by the plan.
        state_bytes: Bytes of the optimizer's state, by the plan. It is cut out of the segments in the first
            step, unless it is there before, as after a checkpoint was loaded.
    """

    sizes: list[int]
    there_bytes: int
    state_bytes: int
    _addresses: list[int] = field(default_factory=list)
    _frees: int | None = None
    _off: bool = False

    @classmethod
    def of(cls, whole: WholeStep | None, resident: Resident) -> "Arena":
        """The arena of a step."""
        sizes = [] if whole is None else list(whole.arena)
        state = resident.optimizer_bytes
        return cls(sizes, resident.total - state, state, _off=not sizes)

    def before_step(self, model: torch.nn.Module) -> None:
        """Reserve what is not there, on the device of a module's parameters."""
        if self._off or torch.compiler.is_compiling():
            return
        device = next((p.device for p in model.parameters()), None)
        if device is None or device.type != "cuda":
            return
        if not torch.cuda.is_current_stream_capturing():
            self.look(CudaMemory(device))

    def look(self, memory: Memory) -> None:
        """Reserve what is not there: at first, and where the device was given something back since."""
        if self._frees is None:
            self._off = self._off or not memory.has_arena()
        if self._off or memory.frees() == self._frees:
            return
        peak = memory.peak_bytes()
        try:
            if self._frees is None:
                memory.empty_cache()  # what is cached by now would be reserved besides
                if memory.allocated_bytes() >= self.there_bytes + self.state_bytes:
                    self.sizes = _less(self.sizes, self.state_bytes)
                self._addresses = _reserved(memory, self.sizes, [])
            else:
                self._reserve_again(memory)
        except torch.OutOfMemoryError:
            self._off = True
            warn(
                f"the GPU has no {format_bytes(sum(self.sizes))} left to reserve before the step: it runs "
                "without, and may reserve more than predicted. Free memory of the GPU and apply the plan "
                "again, or plan for a smaller budget"
            )
        self._frees = memory.frees()
        if memory.peak_bytes() > peak:
            memory.forget_peak()  # the segments were empty

    def _reserve_again(self, memory: Memory) -> None:
        segments = memory.segments()
        kept, gone = list[tuple[int, int]](), list[int]()
        for address, size in zip(self._addresses, self.sizes, strict=True):
            if _within(address, segments, size):  # the device gives addresses again
                kept.append((address, size))
            else:
                gone.append(size)
        there = [s for s in segments if any(_within(address, [s]) for address, _ in kept)]
        gone.sort()  # as the addresses are
        made = _reserved(memory, gone, there)
        self._addresses = [*(address for address, _ in kept), *made]
        self.sizes = [*(size for _, size in kept), *gone]


def _reserved(memory: Memory, sizes: Sequence[int], there: Segments) -> list[int]:
    """Reserve segments, ascending; addresses of these, which are in none of those that are there."""
    addresses, held = [], []
    for size in sorted(sizes):
        while True:
            block = memory.allocate(size)
            held.append(block)  # so that the next is cut out of another segment
            if not _within(block.data_ptr(), there):
                break
        addresses.append(block.data_ptr())
    return addresses


def _within(address: int, segments: Segments, size: int = 1) -> bool:
    return any(begin <= address and address + size <= begin + there for begin, there in segments)


def _less(sizes: Sequence[int], by: int) -> list[int]:
    """Sizes that together are so much less, of the largest first."""
    left = []
    for size in sorted(sizes, reverse=True):
        taken = min(size, by)
        by -= taken
        if size > taken:
            left.append(size - taken)
    return sorted(left)
