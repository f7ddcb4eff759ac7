"""A training loop as allocations and frees in order, and a simulation of the memory reserved for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.allocator.arena import MOST_EVENTS, Arena, Recorder, find_arena
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.settings import AllocatorSettings

Integers = NDArray[np.int64]

STEPS = 2
"""Steps of the loop that are simulated. In the first the optimizer makes its state; all later ones make the
same requests as the second."""
EXPANDABLE = AllocatorSettings(expandable_segments=True)
"""For a second prediction, of what ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` would save."""


@dataclass(frozen=True)
class Allocations:
    """The blocks that a sequence of operations allocates. Operations and blocks are numbered from 0.

    Attributes:
        bytes: The size of each block, in the order of allocation.
        start: The operation that allocates each block.
        end: The operation after which each block is freed, not before `start`. The number of operations, or
            more, for a block that stays.
        workspace: For each operation the bytes that its kernel allocates and frees inside.
        names: For each block the name of its maker, to be shown; may be empty.
        backward_from: The first operation of the backward.
        seconds, operations: The time and the name of each operation, to be shown; may be empty.
    """

    bytes: Integers
    start: Integers
    end: Integers
    workspace: Integers
    names: tuple[str, ...] = ()
    backward_from: int = 0
    seconds: tuple[float, ...] = ()
    operations: tuple[str, ...] = ()

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """The events in order, as pairs of an operation and a code. Each operation allocates its blocks, then
        takes its workspace; then blocks are freed.

        The code of a block is its number if it is allocated, and ``~number`` if it is freed. The code of a
        workspace is the number of blocks.
        """
        length, count = len(self.workspace), len(self.bytes)
        freed = np.flatnonzero(self.end < length)
        scratch = np.flatnonzero(self.workspace > 0)
        step = np.concatenate([self.start, scratch, self.end[freed]])
        kind = np.repeat([0, 1, 2], [count, len(scratch), len(freed)])
        block = np.concatenate([np.arange(count), np.full(len(scratch), count), ~freed])
        sorted_ = np.lexsort((np.arange(len(step)), kind, step))
        return list(zip(step[sorted_].tolist(), block[sorted_].tolist(), strict=True))

    def between(self, other: "Allocations", share: float) -> "Allocations":
        """The same blocks at another size, by linear interpolation: `share` 0 gives these bytes, 1 the
        other's, and more than 1 extrapolates."""

        def mixed(one: Integers, two: Integers) -> Integers:
            return np.maximum(np.rint(one + (two - one) * share), 0).astype(np.int64)

        return replace(
            self, bytes=mixed(self.bytes, other.bytes), workspace=mixed(self.workspace, other.workspace)
        )


@dataclass(frozen=True)
class TrainingLoop:
    """A loop of forward, backward and the optimizer's step.

    Attributes:
        resident: Bytes of each tensor that is there throughout, in the order in which they are made:
            parameters, buffers, gradients that are added to, inputs.
        step: Forward and backward. The blocks that they leave, gradients and outputs, are freed after the
            optimizer's step, as ``zero_grad()`` does.
        libraries: Bytes of cuBLAS's workspaces, two at most. cuBLAS allocates one for each thread that calls
            it, and keeps it: the first for the thread of the forward, the second for autograd's.
        making: The optimizer's first step. The blocks that it leaves are its state, and stay.
        steady: Its later steps. The blocks that they leave are freed when they end.
        arena: Bytes of each segment that is reserved before the first step, ascending.
    """

    resident: tuple[int, ...]
    step: Allocations
    libraries: tuple[int, ...] = ()
    making: Allocations | None = None
    steady: Allocations | None = None
    arena: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reservation:
    """The memory that the caching allocator takes for a loop.

    Attributes:
        reserved_bytes: The most that it reserves, as ``torch.cuda.max_memory_reserved()`` counts.
        allocated_bytes: The most that is allocated, workspaces of libraries included, as
            ``torch.cuda.max_memory_allocated()`` counts: a block that is not split counts whole.
    """

    reserved_bytes: int
    allocated_bytes: int


def reservation(loop: TrainingLoop, settings: AllocatorSettings | None = None) -> Reservation:
    """Simulate the caching allocator for a loop.

    Args:
        loop: The loop.
        settings: The allocator's; None for PyTorch's defaults.
    """
    allocator = CachingAllocator(settings)
    for _ in run(loop, allocator):
        pass
    return Reservation(allocator.peak_reserved_bytes, allocator.peak_allocated_bytes)


def arena_of(loop: TrainingLoop, most_events: int = MOST_EVENTS) -> Arena:
    """Find the segments to reserve before a loop's first step, with the allocator's default settings; see
    :func:`planner.allocator.arena.find_arena`."""
    before, after = Recorder(), Recorder()  # with the same numbers: nothing resident is freed
    for size in loop.resident:
        before.malloc(size)
    for _ in run(replace(loop, resident=(), arena=()), after):
        pass
    return find_arena(before.events, after.events, most_events)


class Allocator(Protocol):
    """An allocator that a loop can run through: a simulated one, or one that only notes the requests."""

    def malloc(self, size: int) -> int:
        """Allocate a block; returns its address or number, or 0 if there is no block to free later."""

    def free(self, address: int) -> None:
        """Free a block, by what :meth:`malloc` returned."""


class Moment(NamedTuple):
    """The place in the loop of the allocator's next event.

    Attributes:
        phase: "resident", "arena", "libraries", "forward", "backward", "optimizer" or "zero_grad".
        what: The name of the block, to be shown.
        sequence: The sequence whose operation runs; None outside of operations.
        operation: The number of that operation in the sequence; -1 outside of operations.
        step: The number of the step, from 0.
    """

    phase: str
    what: str
    sequence: Allocations | None = None
    operation: int = -1
    step: int = 0


def run(loop: TrainingLoop, allocator: Allocator) -> Iterator[Moment]:
    """Run a loop through an allocator.

    Yields:
        Before every event of the allocator, its place in the loop.

    Raises:
        SimulatedOutOfMemory: The allocator's memory is not enough.
    """
    for size in loop.resident:
        yield Moment("resident", "parameters, buffers, inputs")
        allocator.malloc(size)
    for size in loop.arena:
        yield Moment("arena", "reserved beforehand")
        allocator.free(allocator.malloc(size))
    # The operations from which on a workspace of cuBLAS is there, with its bytes.
    due = list(zip((0, loop.step.backward_from), loop.libraries, strict=False))
    for number in range(STEPS):
        left: list[int] = []
        for operation, what in _run_sequence(loop.step, allocator, left):
            while due and operation >= due[0][0]:
                yield Moment("libraries", "workspace of a library", loop.step, operation, number)
                allocator.malloc(due.pop(0)[1])
            phase = "backward" if operation >= loop.step.backward_from else "forward"
            yield Moment(phase, what, loop.step, operation, number)
        update = loop.making if number == 0 else loop.steady
        if update is not None:
            made: list[int] = []
            for operation, what in _run_sequence(update, allocator, made):
                yield Moment("optimizer", what, update, operation, number)
            if number > 0:  # the first step made the state, which stays
                left += made
        for address in left:
            yield Moment("zero_grad", "gradients and outputs are freed", step=number)
            allocator.free(address)


def _run_sequence(
    allocations: Allocations, allocator: Allocator, left: list[int]
) -> Iterator[tuple[int, str]]:
    """Run operations one after the other; yields before each event the operation and the block's name.

    The addresses of the blocks that stay are added to `left`.
    """
    sizes, names = allocations.bytes.tolist(), allocations.names
    workspace = allocations.workspace.tolist()
    addresses: list[int] = [0] * len(sizes)
    for operation, block in allocations.order:
        if block == len(sizes):
            yield operation, "workspace"
            allocator.free(allocator.malloc(workspace[operation]))
            continue
        yield operation, names[block if block >= 0 else ~block] if names else ""
        if block >= 0:
            addresses[block] = allocator.malloc(sizes[block])
        else:
            allocator.free(addresses[~block])
            addresses[~block] = 0
    left += [address for address in addresses if address]


def step_allocations(
    *,
    start: Sequence[int] | Integers,
    end: Sequence[int] | Integers,
    sizes: Sequence[int] | Integers,
    workspace: Sequence[int] | Integers,
    names: Sequence[str] = (),
    backward_from: int = 0,
    seconds: Sequence[float] = (),
    operations: Sequence[str] = (),
) -> Allocations:
    """Make :class:`Allocations` from blocks in any order. An operation allocates its blocks in that order.

    Args:
        start, end, sizes, names: For each block, as in :class:`Allocations`; `sizes` are its `bytes`.
        workspace, seconds, operations: For each operation.
        backward_from: The first operation of the backward.
    """
    starts, ends, amounts = (np.asarray(a, dtype=np.int64) for a in (start, end, sizes))
    order = np.argsort(starts, kind="stable")
    named = tuple(names[i] for i in order.tolist()) if names else ()
    scratch = np.asarray(workspace, dtype=np.int64)
    return Allocations(
        amounts[order],
        starts[order],
        ends[order],
        scratch,
        named,
        backward_from,
        tuple(map(float, seconds)),
        tuple(operations),
    )
