"""The simulated caching allocator: cases worked out by hand from PyTorch's rules, and what always holds."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from planner.allocator.settings import AllocatorSettings, SettingsError

K, M = 1 << 10, 1 << 20
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Case:
    """Events, and what they must lead to.

    ``"a 5M"`` allocates, ``"a 5M @1"`` on stream 1, ``"-a"`` frees, ``"empty"`` empties the cache. ``at``
    says that a block lies so many bytes behind where another is or was.
    """

    events: str
    reserved: int
    allocated: int | None = None
    conf: str = ""
    memory: int | None = None
    allowed: int | None = None
    at: tuple[str, str, int] | None = None
    retries: int = 0
    fails: bool = field(default=False)  # the last event is out of memory


CASES = {
    # Rounding, and the sizes of segments.
    "one byte is a block of 512 in a segment of 2 MiB": Case("a 1", 2 * M, 512),
    "512 bytes stay": Case("a 512", 2 * M, 512),
    "513 bytes are 1024": Case("a 513", 2 * M, 1024),
    "nothing is no block": Case("a 0", 0, 0),
    "1 MiB is small": Case("a 1M", 2 * M, M),
    "a byte more is large": Case("a 1048577", 20 * M, M + 512),
    "less than 10 MiB gets 20": Case("a 10485248", 20 * M, 10 * M - 512),
    "10 MiB get their own": Case("a 10M", 10 * M, 10 * M),
    "more gets multiples of 2 MiB": Case("a 10486272", 12 * M, 10 * M + 512),
    "a rest of less than 1 MiB stays with the block": Case("a 11534337", 12 * M, 12 * M),
    "and so does one of 1 MiB": Case("a 19M", 20 * M, 20 * M),
    # The small pool.
    "two of 1 MiB share a segment": Case("a 1M b 1M", 2 * M, 2 * M, at=("b", "a", M)),
    "three do not": Case("a 1M b 1M c 1M", 4 * M, 3 * M),
    "a rest of 512 bytes is a block": Case("a 1M b 1048064 c 512", 2 * M, 2 * M, at=("c", "a", 2 * M - 512)),
    "what does not fit the rest gets another segment": Case("a 1M b 512K c 524800", 4 * M),
    # The smallest block that is large enough.
    "the smallest cached block": Case(
        "a 512K b 512 c 256K d 512 -a -c e 200K", 2 * M, 201 * K, at=("e", "c", 0)
    ),
    "of equal ones the lowest": Case("a 4K b 512 c 4K d 512 -c -a e 4K", 2 * M, at=("e", "a", 0)),
    "across segments": Case("a 30M b 20M -a -b c 15M", 50 * M, 15 * M, at=("c", "b", 0)),
    "a cached block whose rest is too small is given whole": Case("a 30M -a b 29M", 30 * M, 30 * M),
    "the rest of a large block is cached": Case(
        "a 30M -a b 28M c 1536K", 30 * M, 30 * M, at=("c", "a", 28 * M)
    ),
    "small requests do not come from the large pool": Case("a 30M -a b 512", 32 * M, 512),
    "nor large ones from the small": Case("a 1M -a b 1048577", 22 * M),
    "four of 5 MiB share 20": Case("a 5M b 5M c 5M d 5M", 20 * M, 20 * M),
    "five need 40": Case("a 5M b 5M c 5M d 5M e 5M", 40 * M, 25 * M),
    "two of 9 MiB share 20": Case("a 9M b 9M", 20 * M, 18 * M),
    "three need 40": Case("a 9M b 9M c 9M", 40 * M, 27 * M),
    "the second takes the rest as well": Case("a 9728K b 9728K", 20 * M, 20 * M),
    "streams do not share": Case("a 5M -a b 5M @1", 40 * M, 5 * M),
    # Merging.
    "a block between free ones joins them": Case(
        "a 5M b 5M c 5M -a -c -b d 20M", 20 * M, 20 * M, at=("d", "a", 0)
    ),
    "segments are not joined": Case("a 10M b 10M -a -b c 20M", 40 * M, 20 * M),
    "with the one behind it": Case("a 5M b 5M -b c 14M", 20 * M, 20 * M, at=("c", "b", 0)),
    "with the one before it": Case("a 5M b 5M -a -b c 20M", 20 * M, 20 * M, at=("c", "a", 0)),
    # Giving back.
    "an unused segment is given back": Case("a 30M -a empty", 0, 0),
    "one that is used in part is not": Case("a 5M b 5M -a empty", 20 * M, 5 * M),
    "nor a small one": Case("a 1K b 1K -a empty", 2 * M, 1 * K),
    "before the device is full": Case("a 30M -a b 32M", 32 * M, 32 * M, memory=40 * M, retries=1),
    "what is in use cannot be": Case("a 30M b 20M", 30 * M, 30 * M, memory=40 * M, retries=1, fails=True),
    "nor what shares its segment": Case(
        "a 5M b 5M -a c 22M", 20 * M, 5 * M, memory=40 * M, retries=1, fails=True
    ),
    "an allowed share is a limit": Case("a 30M b 20M", 30 * M, 30 * M, allowed=40 * M, retries=1, fails=True),
    # max_split_size_mb.
    "a block that may not be split is not for less": Case(
        "a 64M -a b 10M", 74 * M, 10 * M, "max_split_size_mb:32"
    ),
    "for a little less it is, whole": Case("a 64M -a b 50M", 64 * M, 64 * M, "max_split_size_mb:32"),
    "for much less it is not": Case("a 80M -a b 50M", 130 * M, 50 * M, "max_split_size_mb:32"),
    "it is given back first": Case(
        "a 80M c 2M -a b 50M", 70 * M, 52 * M, "max_split_size_mb:32", memory=120 * M
    ),
    "as many as it takes, largest first": Case(
        "a 40M b 50M -a -b c 90M", 90 * M, 90 * M, "max_split_size_mb:32", memory=100 * M
    ),
    "the largest first": Case(
        "a 40M b 50M -a -b c 45M", 90 * M, 50 * M, "max_split_size_mb:32", memory=100 * M
    ),
    # roundup_power2_divisions.
    "sizes are rounded to a quarter of a power of 2": Case(
        "a 5000", 2 * M, 5120, "roundup_power2_divisions:4"
    ),
    "large ones too": Case("a 10485761", 12 * M, 12 * M, "roundup_power2_divisions:4"),
    "up to the number of blocks they are not": Case("a 1200", 2 * M, 1536, "roundup_power2_divisions:4"),
    "powers of 2 stay": Case("a 16M", 16 * M, 16 * M, "roundup_power2_divisions:4"),
    "by size": Case(
        "a 3M b 5242881 c 9M", 32 * M, 3 * M + 5632 * K + 12 * M, "roundup_power2_divisions:[2:1,4:8,>:2]"
    ),
    # garbage_collection_threshold.
    "the segment that was unused for longer is given back": Case(
        "a 40M -a b 42M -b c 44M", 86 * M, 44 * M, "garbage_collection_threshold:0.5", allowed=100 * M
    ),
    "below the threshold none is": Case(
        "a 20M -a b 22M", 42 * M, 22 * M, "garbage_collection_threshold:0.5", allowed=100 * M
    ),
    "without an allowed share there is no threshold": Case(
        "a 40M -a b 42M -b c 44M", 126 * M, 44 * M, "garbage_collection_threshold:0.5"
    ),
    # expandable_segments.
    "a small page": Case("a 1", 2 * M, 512, EXPANDABLE),
    "a large page": Case("a 5M", 20 * M, 5 * M, EXPANDABLE),
    "two pages": Case("a 30M b 10M", 40 * M, 40 * M, EXPANDABLE, at=("b", "a", 30 * M)),
    "a free block grows": Case("a 30M -a b 50M", 60 * M, 50 * M, EXPANDABLE, at=("b", "a", 0)),
    "from the free end on": Case("a 30M b 15M", 60 * M, 45 * M, EXPANDABLE, at=("b", "a", 30 * M)),
    "rests of 512 bytes are blocks": Case("a 20971008 b 2M", 40 * M, 22 * M - 512, EXPANDABLE),
    "a hole is used before the end": Case(
        "a 30M b 30M c 30M -b d 20M", 100 * M, 80 * M, EXPANDABLE, at=("d", "b", 0)
    ),
    "unused pages are given back": Case("a 30M b 5M -a empty", 20 * M, 5 * M, EXPANDABLE),
    "and mapped again": Case("a 30M b 5M -a empty c 10M d 20M", 40 * M, 35 * M, EXPANDABLE, at=("d", "a", 0)),
    "all of them": Case("a 30M b 1K -a -b empty", 0, 0, EXPANDABLE),
    "pages are the device's as well": Case(
        "a 30M b 15M", 40 * M, 30 * M, EXPANDABLE, memory=50 * M, retries=1, fails=True
    ),
}


def size_of(text: str) -> int:
    unit = {"K": K, "M": M}.get(text[-1], 1)
    return int(text.rstrip("KM")) * unit


def run(case: Case) -> tuple[CachingAllocator, dict[str, int]]:
    allocator = CachingAllocator(
        AllocatorSettings.parse(case.conf), memory_bytes=case.memory, allowed_bytes=case.allowed
    )
    words, addresses = case.events.split(), {}
    while words:
        word = words.pop(0)
        if word == "empty":
            allocator.empty_cache()
        elif word.startswith("-"):
            allocator.free(addresses[word[1:]])
        else:
            size = size_of(words.pop(0))
            stream = int(words.pop(0)[1:]) if words and words[0].startswith("@") else 0
            if case.fails and not words:
                with pytest.raises(SimulatedOutOfMemory, match=f"{size:,} bytes were asked for"):
                    allocator.malloc(size, stream)
            else:
                addresses[word] = allocator.malloc(size, stream)
    return allocator, addresses


@pytest.mark.parametrize("name", CASES)
def test_worked_out_by_hand(name: str) -> None:
    case = CASES[name]
    allocator, addresses = run(case)
    assert allocator.reserved_bytes == case.reserved
    if case.allocated is not None:
        assert allocator.allocated_bytes == case.allocated
    assert allocator.retries == case.retries
    if case.at is not None:
        block, other, behind = case.at
        assert addresses[block] == addresses[other] + behind
    is_sound(allocator)


def test_peaks_stay() -> None:
    allocator, _ = run(Case("a 30M b 12M -a -b empty c 1K", 0))
    assert (allocator.peak_reserved_bytes, allocator.peak_allocated_bytes) == (42 * M, 42 * M)
    assert allocator.reserved_bytes == 2 * M


def is_sound(allocator: CachingAllocator) -> None:
    """Blocks tile segments, none overlap, no two cached ones lie side by side, and the sums are right."""
    reserved = allocated = requested = last = 0
    for segment in allocator.segments():
        assert segment[0].address >= last
        for before, block in zip([None, *segment], segment, strict=False):
            assert block.size > 0
            assert block.size % 512 == 0
            assert block.requested <= block.size
            assert block.used == (block.requested > 0)
            if before is not None:
                assert block.address == before.address + before.size
                assert before.used or block.used
            reserved += block.size
            allocated += block.size * block.used
            requested += block.requested
        last = segment[-1].address + segment[-1].size
    assert reserved == allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocated == allocator.allocated_bytes <= allocator.peak_allocated_bytes
    assert requested == allocator.requested_bytes <= allocated
    assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes


CONFS = (
    "",
    EXPANDABLE,
    "max_split_size_mb:40",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.4",
    "expandable_segments:True,max_split_size_mb:40,roundup_power2_divisions:[1:4,>:2]",
)


def play(choices: list[tuple[int, int]], conf: str, memory: int | None, check: bool) -> CachingAllocator:
    """Allocate and free by pairs of numbers, free all, and look at what is left."""
    allocator = CachingAllocator(AllocatorSettings.parse(conf), memory_bytes=memory, allowed_bytes=memory)
    live: dict[int, int] = {}
    for choice, size in choices:
        if live and choice % 5 < 2:
            address = list(live)[choice % len(live)]
            allocator.free(address)
            del live[address]
        else:
            try:
                address = allocator.malloc(size, stream=choice % 13 == 0)
            except SimulatedOutOfMemory:
                continue
            assert address not in live
            live[address] = size
        if memory is not None:
            assert allocator.reserved_bytes <= memory
        if check:
            is_sound(allocator)
    assert allocator.requested_bytes == sum(live.values())
    is_sound(allocator)
    for address in live:
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    # Once all is free, all of a segment is one block.
    assert all(len(segment) == 1 for segment in allocator.segments())
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert not list(allocator.segments())
    return allocator


SIZES = st.one_of(st.integers(1, 4 * K), st.integers(1, 3 * M), st.integers(1, 90 * M))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 999), SIZES), max_size=40),
    st.sampled_from(CONFS),
    st.sampled_from([None, 200 * M]),
)
def test_what_always_holds(choices: list[tuple[int, int]], conf: str, memory: int | None) -> None:
    play(choices, conf, memory, check=True)


@pytest.mark.parametrize("conf", CONFS)
def test_thousands_of_sequences(conf: str) -> None:
    rng = random.Random(conf)
    for number in range(350):
        choices = [(rng.randrange(1000), int(2 ** rng.uniform(0, 27))) for _ in range(rng.randrange(60))]
        play(choices, conf, 300 * M if number % 2 else None, check=False)


def test_the_same_sequence_gives_the_same() -> None:
    rng = random.Random(3)
    choices = [(rng.randrange(1000), int(2 ** rng.uniform(9, 26))) for _ in range(300)]
    peaks = {play(choices, "", None, check=False).peak_reserved_bytes for _ in range(2)}
    assert len(peaks) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("expandable_segments:yes", "expected True or False"),
        ("max_split_size_mb:4", "at least 20"),
        ("roundup_power2_divisions:3", "a power of 2"),
        ("roundup_power2_divisions:[3:4]", "a power of 2"),
        ("garbage_collection_threshold:1.5", "above 0 and below 1"),
        ("backend:cudaMallocAsync", "another allocator"),
        ("max_split_size:4", "there is no allocator setting 'max_split_size'"),
        ("expandable_segments", "cannot be read"),
    ],
)
def test_settings_that_cannot_be(text: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("", "expandable_segments", False),
        (" max_split_size_mb : 64 , expandable_segments : True ", "max_split_bytes", 64 * M),
        (
            "backend:native,pinned_use_background_threads:True,expandable_segments:True",
            "expandable_segments",
            True,
        ),
        ("large_segment_size_mb:64", "large_segment_bytes", 64 * M),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold", 0.8),
        ("roundup_power2_divisions:8", "roundup_power2_divisions", (8,) * 16),
        (
            "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
            "roundup_power2_divisions",
            (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1),
        ),
    ],
)
def test_settings_are_read_as_pytorch_reads_them(text: str, field: str, value: Any) -> None:
    assert getattr(AllocatorSettings.parse(text), field) == value
