"""An arena: segments that a GPU's caching allocator reserves before a step begins, and then serves it from.

:mod:`planner.allocator.arena` chooses their sizes, so that the step reserves less in all.
"""

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
    """The part of a device's caching allocator that an arena uses. Tests simulate it."""

    def supports_arena(self) -> bool:
        """Whether it is PyTorch's, and may cut tensors out of larger segments that were reserved before.

        No other method is called where it is not.
        """

    def frees(self) -> int:
        """How many segments it has given back to the device so far."""

    def allocated_bytes(self) -> int:
        """The bytes in use."""

    def segments(self) -> Segments:
        """The segments that are reserved now."""

    def allocate(self, size: int) -> Any:
        """A tensor of so many bytes, or another object with its ``data_ptr()``."""

    def empty_cache(self) -> None:
        """Give unused segments back to the device."""

    def peak_bytes(self) -> int:
        """The most bytes that were in use at once."""

    def reset_peak(self) -> None:
        """Begin to count the peak anew, from the bytes in use now."""


@dataclass(frozen=True)
class CudaMemory:
    """The allocator of a GPU. A number of its statistics takes microseconds to read, the list of segments
    milliseconds."""

    device: torch.device

    def supports_arena(self) -> bool:
        if torch.cuda.get_allocator_backend() != "native":  # a pluggable allocator has no statistics
            return False
        conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        try:
            settings = AllocatorSettings.parse(conf)
        except SettingsError:  # settings of a later PyTorch, or of another allocator
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

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass
class Arena:
    """Reserves segments, and reserves them again where the allocator has given some back.

    Attributes:
        sizes: Bytes of each segment, ascending.
        resident_bytes: The plan's resident bytes without the optimizer's state.
        state_bytes: The plan's bytes of the optimizer's state. The first step cuts it out of the segments,
            unless it exists before, as after a checkpoint was loaded.
    """

    sizes: list[int]
    resident_bytes: int
    state_bytes: int
    _addresses: list[int] = field(default_factory=list)
    _frees: int | None = None  # as the allocator counted them after the last reservation; None before any
    _disabled: bool = False

    @classmethod
    def of(cls, whole: WholeStep | None, resident: Resident) -> "Arena":
        """The arena of a step."""
        sizes = [] if whole is None else list(whole.arena)
        state = resident.optimizer_bytes
        return cls(sizes, resident.total - state, state, _disabled=not sizes)

    def before_step(self, model: torch.nn.Module) -> None:
        """Reserve the segments on the device of a module's parameters, if it is a GPU."""
        if self._disabled or torch.compiler.is_compiling():
            return
        device = next((p.device for p in model.parameters()), None)
        if device is None or device.type != "cuda":
            return
        if not torch.cuda.is_current_stream_capturing():
            self.reserve(CudaMemory(device))

    def reserve(self, memory: Memory) -> None:
        """Reserve all segments at the first call, and later those that went back to the device."""
        if self._frees is None:
            self._disabled = self._disabled or not memory.supports_arena()
        if self._disabled or memory.frees() == self._frees:
            return
        peak = memory.peak_bytes()
        try:
            if self._frees is None:
                memory.empty_cache()  # else unused segments of before stay reserved beside the arena
                if memory.allocated_bytes() >= self.resident_bytes + self.state_bytes:
                    self.sizes = _reduced(self.sizes, self.state_bytes)
                self._addresses = _reserved(memory, self.sizes, [])
            else:
                self._reserve_again(memory)
        except torch.OutOfMemoryError:
            self._disabled = True
            warn(
                f"the GPU has no {format_bytes(sum(self.sizes))} left to reserve before the step: it runs "
                "without, and may reserve more than predicted. Free memory of the GPU and apply the plan "
                "again, or plan for a smaller budget"
            )
        self._frees = memory.frees()
        if memory.peak_bytes() > peak:
            memory.reset_peak()  # the tensors that reserve the segments are no memory of the step

    def _reserve_again(self, memory: Memory) -> None:
        segments = memory.segments()
        kept, gone = list[tuple[int, int]](), list[int]()
        for address, size in zip(self._addresses, self.sizes, strict=True):
            if _within(address, segments, size):  # a smaller new segment may have the same address
                kept.append((address, size))
            else:
                gone.append(size)
        there = [s for s in segments if any(_within(address, [s]) for address, _ in kept)]
        gone.sort()  # `made` has their addresses in ascending order of bytes
        made = _reserved(memory, gone, there)
        self._addresses = [*(address for address, _ in kept), *made]
        self.sizes = [*(size for _, size in kept), *gone]


def _reserved(memory: Memory, sizes: Sequence[int], there: Segments) -> list[int]:
    """Reserve new segments, the smallest first.

    Args:
        memory: The allocator.
        sizes: Bytes of each.
        there: Segments of the arena that are still reserved. A tensor that is cut out of one of them reserves
            nothing.

    Returns:
        The addresses of the new segments, in ascending order of their bytes.
    """
    addresses, held = [], []
    for size in sorted(sizes):
        while True:
            block = memory.allocate(size)
            held.append(block)  # alive until all are reserved: the next is then in another segment
            if not _within(block.data_ptr(), there):
                break
        addresses.append(block.data_ptr())
    return addresses


def _within(address: int, segments: Segments, size: int = 1) -> bool:
    """Whether so many bytes from an address on lie in one of the segments."""
    return any(begin <= address and address + size <= begin + there for begin, there in segments)


def _reduced(sizes: Sequence[int], by: int) -> list[int]:
    """Sizes whose sum is less by so many bytes, ascending: the largest are reduced first, down to none."""
    left = []
    for size in sorted(sizes, reverse=True):
        taken = min(size, by)
        by -= taken
        if size > taken:
            left.append(size - taken)
    return sorted(left)
