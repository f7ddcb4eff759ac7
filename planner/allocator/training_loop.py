"""What a training loop allocates and frees, in order, and what the caching allocator reserves for it."""

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
"""Steps of the loop that are simulated: in the first the optimizer makes its state, the second is like all
that follow."""
EXPANDABLE = AllocatorSettings(expandable_segments=True)


@dataclass(frozen=True)
class Allocations:
    """What a sequence of operations allocates.

    Attributes:
        bytes: Of each block that it allocates, in the order of allocation.
        start, end: During which operation each is allocated, and after which it is freed; an `end` of at
            least the number of operations: it stays.
        workspace: For each operation what its kernel allocates and frees inside.
        names: For each block what made it, to be shown; may be empty.
        backward_from: The first operation of the backward.
        seconds, operations: How long each operation takes, and what it is; may be empty.
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
        """The events as (operation, block): the block's number where it is allocated, ``~number`` where it is
        freed, and the number of blocks for the operation's workspace."""
        length, count = len(self.workspace), len(self.bytes)
        freed = np.flatnonzero(self.end < length)
        scratch = np.flatnonzero(self.workspace > 0)
        step = np.concatenate([self.start, scratch, self.end[freed]])
        kind = np.repeat([0, 1, 2], [count, len(scratch), len(freed)])
        block = np.concatenate([np.arange(count), np.full(len(scratch), count), ~freed])
        sorted_ = np.lexsort((np.arange(len(step)), kind, step))
        return list(zip(step[sorted_].tolist(), block[sorted_].tolist(), strict=True))

    def between(self, other: "Allocations", share: float) -> "Allocations":
        """These at another size: every number of bytes as far on the way to the other's as `share` says."""

        def mixed(one: Integers, two: Integers) -> Integers:
            return np.maximum(np.rint(one + (two - one) * share), 0).astype(np.int64)

        return replace(
            self, bytes=mixed(self.bytes, other.bytes), workspace=mixed(self.workspace, other.workspace)
        )


@dataclass(frozen=True)
class TrainingLoop:
    """A loop of forward, backward and the optimizer's step.

    Attributes:
        resident: Bytes of the tensors that are there throughout, in the order in which they are made:
            parameters, buffers, gradients that are added to, inputs.
        step: Forward and backward. What they leave, gradients and outputs, is freed after the
            optimizer's step, as ``zero_grad()`` does.
        libraries: Workspaces of matrix libraries, which stay: for the forward, and for backward.
        making: The optimizer's first step, which makes its state: what it leaves stays.
        steady: Its later steps; what they leave is freed when they end.
        arena: Bytes of segments that are reserved before the first step, ascending.
    """

    resident: tuple[int, ...]
    step: Allocations
    libraries: tuple[int, ...] = ()
    making: Allocations | None = None
    steady: Allocations | None = None
    arena: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reservation:
    """What the caching allocator makes of a loop.

    Attributes:
        reserved_bytes: The most that it reserves, as ``torch.cuda.max_memory_reserved()`` counts.
        allocated_bytes: The most that is allocated, workspaces of libraries included; of blocks too small to
            be split the whole, as ``torch.cuda.max_memory_allocated()`` counts.
    """

    reserved_bytes: int
    allocated_bytes: int


def reservation(loop: TrainingLoop, settings: AllocatorSettings | None = None) -> Reservation:
    """Run a loop through the caching allocator.

    Args:
        loop: The loop.
        settings: Of the allocator; None for PyTorch's own.
    """
    allocator = CachingAllocator(settings)
    for _ in run(loop, allocator):
        pass
    return Reservation(allocator.peak_reserved_bytes, allocator.peak_allocated_bytes)


def arena_of(loop: TrainingLoop, most_events: int = MOST_EVENTS) -> Arena:
    """The segments to reserve before a loop's first step, by the allocator's default settings; see
    :func:`planner.allocator.arena.find_arena`."""
    before, after = Recorder(), Recorder()
    for size in loop.resident:
        before.malloc(size)
    for _ in run(replace(loop, resident=(), arena=()), after):
        pass
    return find_arena(before.events, after.events, most_events)


class Allocator(Protocol):
    """What a loop runs through."""

    def malloc(self, size: int) -> int:
        """Allocate; the address, or what stands for it."""

    def free(self, address: int) -> None:
        """Free what was allocated."""


class Moment(NamedTuple):
    """What the next event of the allocator belongs to.

    Attributes:
        phase: "resident", "arena", "libraries", "forward", "backward", "optimizer" or "zero_grad".
        what: What makes the block, or frees it.
        sequence, operation: The operation that runs: the allocations that it is of, and its number in them;
            None and -1 outside of operations.
        step: The number of the step.
    """

    phase: str
    what: str
    sequence: Allocations | None = None
    operation: int = -1
    step: int = 0


def run(loop: TrainingLoop, allocator: Allocator) -> Iterator[Moment]:
    """Run a loop through an allocator.

    Yields:
        Before every event of the allocator what it belongs to.

    Raises:
        SimulatedOutOfMemory: The allocator's memory is not enough.
    """
    for size in loop.resident:
        yield Moment("resident", "parameters, buffers, inputs")
        allocator.malloc(size)
    for size in loop.arena:
        yield Moment("arena", "reserved beforehand")
        allocator.free(allocator.malloc(size))
    due = list(zip((0, loop.step.backward_from), loop.libraries, strict=False))
    for number in range(STEPS):
        left: list[int] = []
        for operation, what in _run(loop.step, allocator, left):
            while due and operation >= due[0][0]:
                yield Moment("libraries", "workspace of a library", loop.step, operation, number)
                allocator.malloc(due.pop(0)[1])
            phase = "backward" if operation >= loop.step.backward_from else "forward"
            yield Moment(phase, what, loop.step, operation, number)
        update = loop.making if number == 0 else loop.steady
        if update is not None:
            made: list[int] = []
            for operation, what in _run(update, allocator, made):
                yield Moment("optimizer", what, update, operation, number)
            if number > 0:
                left += made
        for address in left:
            yield Moment("zero_grad", "gradients and outputs are freed", step=number)
            allocator.free(address)


def _run(allocations: Allocations, allocator: Allocator, left: list[int]) -> Iterator[tuple[int, str]]:
    """Operations one after the other; blocks that they do not free are added to `left`."""
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
    """Allocations from blocks in any order; of the same operation the first is allocated first.

    Args:
        start, end, sizes, names: Of each block, as for :class:`Allocations`.
        workspace, seconds, operations: Of each operation.
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
