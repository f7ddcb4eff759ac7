"""Blocks of memory, in use and cached, and the pools that cached ones are in."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Optional

from planner.allocator.settings import SMALL_SEGMENT

_Key = tuple[int, int, int, "Block"]


class Block:
    """A contiguous part of a segment, linked to the parts next to it.

    Attributes:
        address, size: In bytes.
        requested: The bytes that were asked for if it is in use.
        used: Whether it is in use; else it is cached.
        mapped: Whether there is memory behind its addresses; without expandable segments there always is.
        before, after: Its neighbours in the segment.
        expandable: The expandable segment that it is in.
        cached_at: The number of requests that its pool had seen when it was cached.
    """

    __slots__ = (
        "address", "after", "before", "cached_at", "expandable", "mapped", "pool", "requested", "size",
        "stream", "used",
    )  # fmt: skip

    def __init__(
        self,
        pool: "Pool",
        stream: int,
        address: int,
        size: int,
        expandable: Optional["ExpandableSegment"] = None,
    ) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.requested = 0
        self.used, self.mapped = False, True
        self.before: Block | None = None
        self.after: Block | None = None
        self.expandable = expandable
        self.cached_at = 0

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None

    def cut(self, size: int) -> "Block":
        """Make a block of its own of the first `size` bytes; this one is the rest."""
        first = Block(self.pool, self.stream, self.address, size, self.expandable)
        first.before, first.after = self.before, self
        if self.before is not None:
            self.before.after = first
        self.before = first
        self.address += size
        self.size -= size
        return first

    def insert_after(self, other: "Block") -> None:
        """Put another block between this one and the next."""
        other.before, other.after = self, self.after
        if self.after is not None:
            self.after.before = other
        self.after = other


class ExpandableSegment:
    """Addresses for more than the whole memory, of which pages are mapped as they are needed.

    Attributes:
        page: Bytes by which it grows.
        size: Bytes of addresses.
    """

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address, self.size, self.page = address, size, page

    def pages_over(self, start: int, end: int) -> tuple[int, int]:
        """From the page that an address is in to the end of the page that another ends in."""
        first, last = start - self.address, end - self.address
        return self.address + first // self.page * self.page, self.address + -(-last // self.page) * self.page

    def pages_within(self, start: int, end: int) -> tuple[int, int]:
        """The pages that are wholly between two addresses."""
        first, last = start - self.address, end - self.address
        return self.address + -(-first // self.page) * self.page, self.address + last // self.page * self.page


class Pool:
    """The cached blocks of one pool, by stream, size and address; and the unmapped ones, by address.

    Attributes:
        small: It is the pool of requests of at most 1 MiB.
        requests: How often a block was looked for, for garbage collection.
    """

    def __init__(self, small: bool, large_segment_bytes: int) -> None:
        self.small, self.requests = small, 0
        self.page = SMALL_SEGMENT if small else large_segment_bytes
        self._free: list[_Key] = []
        self._unmapped: list[tuple[int, int, Block]] = []

    def cache(self, block: Block) -> None:
        """Put a block among the cached ones."""
        block.cached_at = self.requests
        insort(self._free, (block.stream, block.size, block.address, block))

    def take(self, block: Block) -> None:
        """Take a block from the cached ones."""
        del self._free[bisect_left(self._free, (block.stream, block.size, block.address))]

    def at_least(self, stream: int, size: int) -> int:
        """The position of the smallest cached block of a stream that is at least so large."""
        return bisect_left(self._free, (stream, size))

    def at(self, position: int, stream: int) -> Block | None:
        """The cached block at a position, if it is of that stream."""
        if not 0 <= position < len(self._free):
            return None
        found = self._free[position]
        return found[3] if found[0] == stream else None

    def cached(self) -> list[Block]:
        """The cached blocks, smallest first within a stream."""
        return [key[3] for key in self._free]

    def unmap(self, block: Block) -> None:
        """Put a block among those without memory."""
        insort(self._unmapped, (block.stream, block.address, block))

    def take_unmapped(self, block: Block) -> None:
        """Take a block from those without memory."""
        del self._unmapped[bisect_left(self._unmapped, (block.stream, block.address))]

    def unmapped(self, stream: int) -> Iterator[Block]:
        """The blocks of a stream without memory, by address."""
        return iter([block for of, _, block in self._unmapped if of == stream])
