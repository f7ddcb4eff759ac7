"""The caching allocator of PyTorch for CUDA, without CUDA and without memory.

It is deterministic: which block a request gets, and when a segment is asked of the device, follows from the
requests and frees before it. The rules are those of ``DeviceCachingAllocator`` in PyTorch's
``c10/cuda/CUDACachingAllocator.cpp``:

* A request is rounded up to 512 bytes, and comes from the small pool (up to 1 MiB) or the large one.
* It gets the smallest cached block of its pool and stream that is large enough; of equal ones that of the
  lowest address. What is left of the block becomes a cached block: in the small pool and in expandable
  segments from 512 bytes on, in the large pool only if it is more than 1 MiB.
* Where there is none, a segment is asked of the device: 2 MiB in the small pool; in the large pool 20 MiB
  for less than 10 MiB, else the request rounded up to 2 MiB.
* A freed block is merged with cached neighbours in its segment. Segments stay reserved.
* If the device has no more, segments of which nothing is in use are given back, and it is asked again.
* With expandable segments each pool has one segment for a stream, which grows at its end, and whose unused
  pages are given back one by one.

What is not here: private pools of CUDA graphs, and events of other streams: a block is free once it is
freed. Addresses of segments are not known in advance; here later ones are higher.
"""

from collections.abc import Iterator

from planner.allocator.blocks import Block, ExpandableSegment, Pool
from planner.allocator.settings import LARGE_ROUNDING, MIN_BLOCK, SMALL_SIZE, AllocatorSettings
from planner.errors import PlannerError

_FIRST_ADDRESS = 0x7F00_0000_0000
_UNLIMITED = 1 << 46

TraceEntry = tuple[str, int, int, int]
"""An action ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
"segment_unmap", "oom"), and the address, bytes and stream of the block or segment."""


class SimulatedOutOfMemory(PlannerError):
    """The device has no memory for a request, even after all unused segments were given back."""


class CachingAllocator:
    """One device's caching allocator.

    Attributes:
        reserved_bytes: Segments, as ``torch.cuda.memory_reserved()`` counts them.
        allocated_bytes: Blocks in use, as ``torch.cuda.memory_allocated()`` counts them.
        requested_bytes: The bytes of these blocks that were asked for, before rounding.
        peak_reserved_bytes, peak_allocated_bytes: The most that the first two were.
        retries: How often all unused segments were given back for a request.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        memory_bytes: int | None = None,
        allowed_bytes: int | None = None,
        trace: list[TraceEntry] | None = None,
    ) -> None:
        """
        Args:
            settings: None for PyTorch's defaults.
            memory_bytes: The memory that the device has for segments; None for any amount.
            allowed_bytes: The part of it that ``torch.cuda.set_per_process_memory_fraction`` allows.
            trace: A list to which every event is added.
        """
        self.settings = settings or AllocatorSettings()
        self.memory_bytes, self.allowed_bytes = memory_bytes, allowed_bytes
        self.reserved_bytes = self.allocated_bytes = self.requested_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        self._trace = trace
        large = self.settings.large_segment_bytes
        self._small, self._large = Pool(True, large), Pool(False, large)
        self._used: dict[int, Block] = {}
        self._next_address = _FIRST_ADDRESS
        self._most_split = self.settings.max_split_bytes or _UNLIMITED

    # ---- what programs call ------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate.

        Args:
            size: Bytes; for none there is no block, and the address is 0.
            stream: By its number.

        Returns:
            The address of the block.

        Raises:
            SimulatedOutOfMemory: The device has no memory for it.
        """
        if size <= 0:
            return 0
        wanted = self.settings.block_bytes(size)
        pool = self._small if wanted <= SMALL_SIZE else self._large
        block = self._cached(pool, stream, wanted)
        if block is None:
            block = self._from_device(pool, stream, wanted)
        if self._splits(block, wanted):
            block = self._split(block, wanted)
        block.used, block.requested = True, size
        self._used[block.address] = block
        self.allocated_bytes += block.size
        self.requested_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._note("alloc", block.address, size, stream)
        return block.address

    def free(self, address: int) -> None:
        """Free a block; address 0 is none.

        Raises:
            KeyError: Nothing is in use at that address.
        """
        if not address:
            return
        block = self._used.pop(address)
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        self._note("free_requested", address, block.requested, block.stream)
        self._note("free_completed", address, block.requested, block.stream)
        block.used, block.requested = False, 0
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.cache(block)

    def empty_cache(self) -> None:
        """Give unused segments back to the device, as ``torch.cuda.empty_cache()`` does."""
        for pool in (self._large, self._small):
            unused = pool.cached()
            for block in unused:
                if block.expandable is None and block.whole:
                    self._release(block)
            for block in unused:
                if block.expandable is not None:
                    self._unmap(block)

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each segment, by address; of an expandable one, those of each mapped stretch."""
        blocks = [*self._used.values(), *self._small.cached(), *self._large.cached()]
        for head in sorted(blocks, key=lambda block: block.address):
            if head.before is not None and head.before.mapped:
                continue
            stretch, block = [], head
            while True:
                stretch.append(block)
                if block.after is None or not block.after.mapped:
                    break
                block = block.after
            yield stretch

    # ---- cached blocks -------------------------------------------------------------------------------

    def _cached(self, pool: Pool, stream: int, size: int) -> Block | None:
        pool.requests += 1
        position = pool.at_least(stream, size)
        block = pool.at(position, stream)
        if block is None:
            return None
        if block.expandable is not None:
            # The size of a block that can grow is the one that it can grow to.
            following = pool.at(position + 1, stream)
            while (
                block.expandable is not None
                and following is not None
                and _size_it_can_have(following) < _size_it_can_have(block)
            ):
                position += 1
                block, following = following, pool.at(position + 1, stream)
        if size < self._most_split <= block.size:
            return None
        if size >= self._most_split and block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        pool.take(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        return size < self._most_split and rest > SMALL_SIZE

    def _split(self, block: Block, size: int) -> Block:
        """The first `size` bytes of a block; the rest is cached."""
        first = block.cut(size)
        block.pool.cache(block)
        return first

    def _merge(self, block: Block, other: Block | None) -> None:
        """Make one block of two neighbours, if the other is not in use and both are mapped, or neither."""
        if other is None or other.used or other.mapped != block.mapped:
            return
        if other.mapped:
            block.pool.take(other)
        else:
            block.pool.take_unmapped(other)
        if block.before is other:
            block.address = other.address
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    # ---- segments ------------------------------------------------------------------------------------

    def _from_device(self, pool: Pool, stream: int, size: int) -> Block:
        if self.allowed_bytes is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        block = self._new(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._new(pool, stream, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(pool, stream, size)
        if block is None:
            self._note("oom", self._room(), size, stream)
            raise SimulatedOutOfMemory(
                f"out of memory: {size:,} bytes were asked for, {self.reserved_bytes:,} are reserved, "
                f"{self.allocated_bytes:,} of them in use"
            )
        return block

    def _room(self) -> int:
        return (self.memory_bytes or _UNLIMITED) - self.reserved_bytes

    def _new(self, pool: Pool, stream: int, size: int) -> Block | None:
        segment = self.settings.segment_bytes(size)
        # For expandable segments too, PyTorch checks the allowed share with this size.
        if self.allowed_bytes is not None and self.reserved_bytes + segment > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grown(pool, stream, size)
        if segment > self._room():
            return None
        block = Block(pool, stream, self._addresses(segment), segment)
        self._reserve(segment)
        self._note("segment_alloc", block.address, segment, stream)
        return block

    def _addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        return address

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, block: Block) -> None:
        """Give a whole segment back to the device."""
        block.pool.take(block)
        self.reserved_bytes -= block.size
        self._note("segment_free", block.address, block.size, block.stream)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Give back blocks that are too large to be split, as many as a request needs."""
        if self.settings.max_split_bytes is None:
            return False
        wanted = max(size, self._most_split)
        position = pool.at_least(stream, wanted)
        block = pool.at(position, stream)
        if block is not None:
            if block.expandable is None:
                self._release(block)
            return True
        released, position = 0, position - 1
        while released < wanted:
            block = pool.at(position, stream)
            if block is None or block.size < self._most_split:
                break
            if block.expandable is None:
                released += block.size
                self._release(block)
            position -= 1
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back large segments that have not been used for longer than others."""
        assert self.allowed_bytes is not None
        threshold = int(self.settings.garbage_collection_threshold * self.allowed_bytes)
        if self.reserved_bytes <= threshold:
            return
        target, reclaimed = self.reserved_bytes - threshold, 0
        pool = self._large
        candidates = [b for b in pool.cached() if b.whole and b.expandable is None]
        while reclaimed < target and candidates:
            age = sum(pool.requests - b.cached_at for b in candidates) / len(candidates)
            old = [b for b in candidates if pool.requests - b.cached_at >= age]
            for block in old:
                reclaimed += block.size
                self._release(block)
            if not old:
                break
            candidates = [b for b in candidates if b not in old]

    # ---- expandable segments -------------------------------------------------------------------------

    def _grown(self, pool: Pool, stream: int, size: int) -> Block | None:
        """A block at the lowest addresses where free and unmapped memory together are enough."""
        block = self._place(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # it has taken in the block before it
        pool.take(block)
        return block

    def _place(self, pool: Pool, stream: int, size: int) -> Block:
        for unmapped in pool.unmapped(stream):
            first = unmapped
            if unmapped.before is not None and not unmapped.before.used:
                first = unmapped.before
            found = first.size
            block = first.after
            while found < size and block is not None and not block.used:
                found += block.size
                block = block.after
            if found >= size:
                return first
        memory = self.memory_bytes or _UNLIMITED
        total = -(-(memory + memory // 8) // pool.page) * pool.page
        segment = ExpandableSegment(self._addresses(total), total, pool.page)
        made = Block(pool, stream, segment.address, total, segment)
        made.mapped = False
        pool.unmap(made)
        return made

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the beginning of an unmapped block; False where the device has none."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        start, end = segment.pages_over(block.address, block.address + size)
        if end - start > self._room():
            return False
        pool.take_unmapped(block)
        block.mapped = True
        if end - start < block.size:
            rest = Block(pool, block.stream, end, block.size - (end - start), segment)
            rest.mapped = False
            block.insert_after(rest)
            pool.unmap(rest)
            block.size = end - start
        self._merge(block, block.before)
        self._merge(block, block.after)
        pool.cache(block)
        self._reserve(end - start)
        self._note("segment_map", start, end - start, block.stream)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that are wholly within a cached block."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        start, end = segment.pages_within(block.address, block.address + block.size)
        if start >= end:
            return
        pool.take(block)
        last = block.address + block.size
        if start > block.address:
            pool.cache(block.cut(start - block.address))
        if last > end:
            tail = Block(pool, block.stream, end, last - end, segment)
            block.insert_after(tail)
            pool.cache(tail)
        block.address, block.size, block.mapped = start, end - start, False
        self._merge(block, block.before)
        self._merge(block, block.after)
        if not (block.whole and block.size == segment.size):
            pool.unmap(block)
        self.reserved_bytes -= end - start
        self._note("segment_unmap", start, end - start, block.stream)

    def _note(self, action: str, address: int, size: int, stream: int) -> None:
        if self._trace is not None:
            self._trace.append((action, address, size, stream))


def _size_it_can_have(block: Block) -> int:
    more = block.after.size if block.after is not None and not block.after.mapped else 0
    return block.size + more
