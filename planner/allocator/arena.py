"""Segments that are reserved before a training loop begins, so that less is lost between blocks.

The caching allocator takes segments as requests come, and the parts that no later request can use are lost.
If all requests are known beforehand, a few segments suffice that together are hardly larger than the most
bytes in use at once. To reserve one, a block of its size is allocated and freed before the first step: its
segment stays reserved, and requests are cut out of it. The sizes are searched for by simulating the loop's
large blocks. Blocks of at most 1 MiB lie in segments of 2 MiB of their own, with an arena as without.

The numbers of the search were chosen by trying others on loops of BERT at the batches of
`benchmarks/headlines.py`; what they reach is in `docs/results/headlines.md` and `docs/results/arena.md`.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.allocator.settings import LARGE_ROUNDING, MIN_LARGE_REQUEST, SMALL_SIZE, AllocatorSettings

_SETTINGS = AllocatorSettings()
MOST_SEGMENTS = 6
MOST_EVENTS = 1_000_000
"""Allocations and frees that a search simulates, :data:`_TRY` more a try. The try that reaches this number is
the last."""
THOROUGH_EVENTS = 10_000_000
"""The same for a plan that is stored, as long as more than ``_FAR`` is lost."""
_NEAR, _FAR = 1 / 500, 1 / 20
"""Shares of the most bytes in use. The search ends when less than ``_NEAR`` is lost, and once ``MOST_EVENTS``
are simulated when less than ``_FAR`` is."""
_PATIENCE = 60
"""Tries that get no further before the search begins anew from other segments."""
_TRY = 50
"""What a try costs besides its events, as so many of them."""
_SHARES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, -0.01, -0.02, -0.03, -0.05, -0.1, -0.15, -0.2)
"""By which share of the most bytes in use a single segment is larger, for the first tries."""
_LESS, _AFTER_SUCCESS, _AFTER_VAIN_TRIES = 0.005, 1.2, 0.9
"""The share by which the next segments reserve less than the best, at first, and by what it is multiplied
after segments with which the loop ends, and after tries in vain."""
_BY_SIZE = 0.7
"""A block is drawn with a weight of its size to this power: the holes that matter lie between large ones."""

Event = tuple[int, int]
"""The number of a block, and its bytes if it is allocated, or 0 if it is freed."""
_AT_ONCE = -1
"""The number of each block that is allocated and freed at once: one event stands for both."""


class Recorder:
    """Takes the place of an allocator, and notes the requests for the large pool.

    Attributes:
        events: Allocations and frees.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._count = 0

    def count_from(self, other: "Recorder") -> None:
        """Give new blocks numbers above those of another recorder, so that its blocks can be freed here."""
        self._count = other._count

    def malloc(self, size: int) -> int:
        """The number of a large block; 0 for others."""
        wanted = _SETTINGS.block_bytes(size)
        if wanted <= SMALL_SIZE:
            return 0
        self._count += 1
        self.events.append((self._count, wanted))
        return self._count

    def free(self, number: int) -> None:
        """Free a block by its number."""
        if not number:
            return
        if self.events and self.events[-1][0] == number:
            self.events[-1] = (_AT_ONCE, self.events[-1][1])
        else:
            self.events.append((number, 0))


@dataclass
class LargePool:
    """The large pool of :class:`planner.allocator.caching_allocator.CachingAllocator` at default settings,
    for one stream and without addresses that mean anything: several times as fast.

    Attributes:
        reserved_bytes: Bytes of its segments.
    """

    reserved_bytes: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)  # bytes and addresses, ascending
    _sizes: dict[int, int] = field(default_factory=dict)  # of cached blocks by where they begin
    _begins: dict[int, int] = field(default_factory=dict)  # and where they begin by where they end
    _used: dict[int, tuple[int, int]] = field(default_factory=dict)  # address and bytes by number
    _next: int = 0

    def copy(self) -> "LargePool":
        """A pool in the same state."""
        free, sizes, begins, used = self._free, self._sizes, self._begins, self._used
        copied = free.copy(), sizes.copy(), begins.copy(), used.copy()
        return LargePool(self.reserved_bytes, *copied, self._next)

    def reserve(self, segments: Iterable[int]) -> None:
        """Allocate blocks of these sizes, each freed before the next."""
        self.run((_AT_ONCE, size) for size in segments)

    def run(self, events: Iterable[Event], most_bytes: float = float("inf")) -> int:
        """Allocate and free, until more than `most_bytes` are reserved.

        Returns:
            The number of events that were run, the one that needed too much included.
        """
        free, sizes, begins, used = self._free, self._sizes, self._begins, self._used
        count = 0
        for number, size in events:
            count += 1
            if size:
                at = bisect_left(free, (size, 0))
                if at < len(free):
                    if number == _AT_ONCE:
                        continue  # what is cut off is joined again
                    block, address = free.pop(at)
                    del sizes[address], begins[address + block]
                else:
                    block, address = _SETTINGS.segment_bytes(size), self._next
                    self.reserved_bytes += block
                    if self.reserved_bytes > most_bytes:
                        break
                    self._next += block + LARGE_ROUNDING  # a gap: segments are not joined
                    if number == _AT_ONCE:
                        size = 0  # it is free again: all of the segment stays in the cache
                rest = block - size
                if rest > SMALL_SIZE:
                    begin = address + size
                    insort(free, (rest, begin))
                    sizes[begin], begins[begin + rest] = rest, begin
                    block = size
                if size:
                    used[number] = address, block
            else:
                address, block = used.pop(number)
                end = address + block
                if end in sizes:
                    more = sizes.pop(end)
                    del free[bisect_left(free, (more, end))]
                    end += more
                if address in begins:
                    begin = begins.pop(address)
                    del free[bisect_left(free, (address - begin, begin))]
                    address = begin
                insort(free, (end - address, address))
                sizes[address], begins[end] = end - address, address
        return count


@dataclass(frozen=True)
class Arena:
    """The segments to reserve before a loop.

    Attributes:
        segments: Bytes of each segment, ascending, no two alike; empty if they would save nothing.
        saved_bytes: The bytes that are reserved less with them than without.
    """

    segments: tuple[int, ...] = ()
    saved_bytes: int = 0


def find_arena(before: Sequence[Event], loop: Sequence[Event], most_events: int = MOST_EVENTS) -> Arena:
    """Find the segments with which the fewest bytes are reserved.

    Args:
        before: The events before the segments are reserved.
        loop: The events afterwards.
        most_events: The number of events that are simulated, all tries together.
    """
    search = _Search(before, loop, most_events)
    search.run()
    return Arena(search.best, search.without_bytes - search.best_bytes)


class _Search:
    """Tries one segment, then several. These reserve a little less than the best so far. Their sizes
    are changed at random; a change stays if the loop then runs no fewer events before it needs another
    segment. Segments with which it ends are the new best, and the search goes on below them.

    Attributes:
        best: The best segments.
        best_bytes, without_bytes: The bytes that are reserved with these, and without any.
    """

    def __init__(self, before: Sequence[Event], loop: Sequence[Event], most_events: int) -> None:
        self._start, self._loop = LargePool(), loop
        self._start.run(before)
        without = self._start.copy()
        self._left = most_events - without.run(loop)
        self._beyond = most_events - MOST_EVENTS  # so many are left when MOST_EVENTS are simulated
        self.best: tuple[int, ...] = ()
        self.best_bytes = self.without_bytes = without.reserved_bytes
        self._less = _LESS
        self._peak = most_in_use(loop)
        in_use = most_in_use([*before, *loop])
        self._near, self._far = (int(in_use * (1 + share)) + LARGE_ROUNDING for share in (_NEAR, _FAR))
        self._blocks = sorted({size for _, size in loop if size})
        self._weights = [size**_BY_SIZE for size in self._blocks]
        self._random = random.Random(0)

    def run(self) -> None:
        """Search until as little is reserved as is in use, or all tries are spent."""
        if self._peak < MIN_LARGE_REQUEST or self.without_bytes == self._start.reserved_bytes:
            return  # less than any segment would be, or no segment is needed
        for share in _SHARES:
            if self._done():
                return
            self._reach(_segments([self._peak * (1 + share)]))
        while not self._done():
            self._climb(self._some())
            self._less *= _AFTER_VAIN_TRIES

    def _climb(self, segments: tuple[int, ...]) -> None:
        """Change segments, from these on, until :data:`_PATIENCE` tries got no further in the loop."""
        now = self._with_less(segments)
        most, in_vain = self._reach(now), 0
        while in_vain <= _PATIENCE and not self._done():
            if most > len(self._loop):
                self._less *= _AFTER_SUCCESS
                now = self._with_less(now)
                most, in_vain = self._reach(now), 0
            changed = self._with_less(self._changed(now))
            events = self._reach(changed) if changed != now else 0
            in_vain = 0 if events > most else in_vain + 1
            if events >= most:
                now, most = changed, events

    def _with_less(self, segments: tuple[int, ...]) -> tuple[int, ...]:
        """The segments with a largest one of such a size that they reserve the best's bytes less a share."""
        there = self.best_bytes - self._start.reserved_bytes
        units = min(int(there * (1 - self._less)), there - 1) // LARGE_ROUNDING
        return _segments((*segments[:-1], units * LARGE_ROUNDING - sum(segments[:-1])))

    def _done(self) -> bool:
        enough = self._near if self._left > self._beyond else self._far
        least = self._start.reserved_bytes + MIN_LARGE_REQUEST  # no arena reserves less
        return self._left <= 0 or self.best_bytes <= max(enough, least)

    def _reach(self, segments: tuple[int, ...]) -> int:
        """The number of the loop's events until it needs a further segment; one more than it has if it needs
        none. Then these segments are the best. 0 if they reserve no less than the best."""
        pool = self._start.copy()
        pool.reserve(segments)
        reserved = pool.reserved_bytes
        self._left -= _TRY
        if reserved >= self.best_bytes:
            return 0
        events = pool.run(self._loop, reserved)
        self._left -= events
        if pool.reserved_bytes > reserved:
            return events
        self.best, self.best_bytes = segments, reserved
        return events + 1

    def _some(self) -> tuple[int, ...]:
        """A few segments at random, which together hold about the most bytes in use. All but one have the
        size of a few blocks."""
        draw = self._random
        found = [self._peak * (1 + draw.uniform(0, 0.08))]
        for _ in range(draw.randrange(MOST_SEGMENTS)):
            part = self._block() * draw.randint(1, 4)
            if found[0] - part >= MIN_LARGE_REQUEST:
                found[0] -= part
                found.append(part)
        return _segments(found)

    def _block(self) -> int:
        """The size of a block of the loop, drawn at random, large ones more often."""
        return self._random.choices(self._blocks, self._weights)[0]

    def _changed(self, segments: tuple[int, ...]) -> tuple[int, ...]:
        """The segments after a random change: one gets another size, is cut in two, or joined to another."""
        draw, found = self._random, list[float](segments or self._some())
        at, to, block = draw.randrange(len(found)), draw.randrange(len(found)), self._block()
        way = draw.choice(("size", "move", "move", "cut", "join"))
        if way == "move" and at != to:
            found[at] -= block
            found[to] += block
        elif way == "cut" and len(found) < MOST_SEGMENTS:
            part = block * draw.randint(1, 3)
            found[at] -= part
            found.append(part)
        elif way == "join" and at != to:
            found[to] += found[at]
            found[at] = 0
        else:
            found[at] += self._peak * draw.choice((0.1, 0.02, 0.005)) * draw.uniform(-1, 1)
        return _segments(found) or segments


def most_in_use(events: Iterable[Event]) -> int:
    """The most bytes of blocks that are in use at once."""
    now = most = 0
    there: dict[int, int] = {}
    for number, size in events:
        most = max(most, now + size)
        if number != _AT_ONCE:
            now += size or -there.pop(number, 0)  # blocks from before these events do not count
            there[number] = size
    return most


def _segments(sizes: Iterable[float]) -> tuple[int, ...]:
    """Segments of about these sizes, as PyTorch makes them. Each is larger than those before it: else it
    would be cut out of one of these."""
    found: list[int] = []
    for size in sorted(sizes):
        if size >= MIN_LARGE_REQUEST:
            least = found[-1] + 1 if found else 0
            found.append(-(-max(int(size), least) // LARGE_ROUNDING) * LARGE_ROUNDING)
    return tuple(found)
