"""The settings of the caching allocator, and the sizes that they make of a request.

The rules are those of PyTorch's ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp``.
"""

import re
from dataclasses import dataclass, replace

from planner.errors import PlannerError

MIB = 1 << 20
MIN_BLOCK = 512  # kMinBlockSize: every block is a multiple
SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: a segment of the small pool
MIN_LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
LARGE_ROUNDING = 2 * MIB  # kRoundLarge: which is a multiple of this
_INTERVALS = 16  # of roundup_power2_divisions: 1 MiB to 64 GiB

# Other settings that PyTorch accepts, which change no size: of pinned memory, of locks and of graphs.
_OTHER = re.compile(
    r"pinned_\w+|release_lock_on_(cuda|hip)?malloc|release_lock_on_device_malloc"
    r"|graph_capture_record_stream_reuse|per_process_memory_fraction|throw_on_cudamalloc_oom"
)
_ITEM = re.compile(r"\s*(?P<key>\w+)\s*:\s*(?P<value>\[[^\]]*\]|[^,\[\]]+)\s*(?:,|$)")


class SettingsError(PlannerError, ValueError):
    """A setting of the allocator is unknown, or its value is not valid."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` (``PYTORCH_ALLOC_CONF``) sets.

    Attributes:
        expandable_segments: One segment for each pool that grows, instead of many of fixed sizes.
        max_split_bytes: Blocks of this size and more are not split; None: all may be.
        max_non_split_rounding_bytes: A block that is not split may be too large by less than this.
        large_segment_bytes: A segment for requests of more than 1 and less than 10 MiB.
        roundup_power2_divisions: For sizes from 1 MiB, 2 MiB, 4 MiB, ... on: into how many parts the range up
            to the next power of 2 is divided. Sizes are rounded up to a multiple of a part; 0: not rounded.
        garbage_collection_threshold: Share of the allowed memory above which unused segments are given back
            before new ones are made; 0: never. As in PyTorch it counts only where the process's share
            of the memory is set (``torch.cuda.set_per_process_memory_fraction``).
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Read the value of ``PYTORCH_CUDA_ALLOC_CONF``.

        Args:
            text: As in ``"expandable_segments:True,max_split_size_mb:128"``; empty for the defaults.

        Raises:
            SettingsError: Names the setting that PyTorch does not have, or the value that it does not take.
        """
        settings, at = cls(), 0
        text = text.strip()
        while at < len(text):
            item = _ITEM.match(text, at)
            if item is None:
                raise SettingsError(
                    f"allocator settings {text!r} cannot be read from {text[at : at + 30]!r} on: expected "
                    "name:value, as in 'expandable_segments:True,max_split_size_mb:128'"
                )
            settings = _with(settings, item["key"], item["value"].strip())
            at = item.end()
        return settings

    def block_bytes(self, size: int) -> int:
        """The bytes of the block that a request is rounded up to."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max(size.bit_length() - 1 - 20, 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            power = 1 << (size.bit_length() - 1)
            part = power // divisions
            return -(-size // part) * part
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_bytes(self, block: int) -> int:
        """The bytes of a new segment for a block."""
        if block <= SMALL_SIZE:
            return SMALL_SEGMENT
        if block < MIN_LARGE_REQUEST:
            return self.large_segment_bytes
        return -(-block // LARGE_ROUNDING) * LARGE_ROUNDING


def _with(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise _refused(key, value, "True or False")
        return replace(settings, expandable_segments=value == "True")
    if key == "max_split_size_mb":
        return replace(settings, max_split_bytes=_whole(key, value, 20) * MIB)
    if key == "max_non_split_rounding_mb":
        return replace(settings, max_non_split_rounding_bytes=_whole(key, value, 20) * MIB)
    if key == "large_segment_size_mb":
        return replace(settings, large_segment_bytes=_whole(key, value, 20) * MIB)
    if key == "roundup_power2_divisions":
        return replace(settings, roundup_power2_divisions=_divisions(key, value))
    if key == "garbage_collection_threshold":
        try:
            threshold = float(value)
        except ValueError:
            threshold = 0.0
        if not 0 < threshold < 1:
            raise _refused(key, value, "a share above 0 and below 1")
        return replace(settings, garbage_collection_threshold=threshold)
    if key == "backend" and value != "native":
        raise SettingsError(
            f"allocator setting backend:{value} is another allocator than the simulated one, PyTorch's native"
        )
    if key != "backend" and not _OTHER.fullmatch(key):
        raise SettingsError(
            f"there is no allocator setting {key!r}; expected some of expandable_segments, "
            "max_split_size_mb, max_non_split_rounding_mb, large_segment_size_mb, roundup_power2_divisions, "
            "garbage_collection_threshold"
        )
    return settings


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or ``[256:1,512:2,>:8]``: up to 256 MiB, from 512 MiB, and above the last."""
    if not value.startswith("["):
        return (_power(key, value),) * _INTERVALS
    found, last, first = [0] * _INTERVALS, -1, True
    for item in value.strip("[]").split(","):
        size, _, divisions = (part.strip() for part in item.partition(":"))
        if size == ">":
            found[last + 1 :] = [_power(key, divisions)] * (_INTERVALS - last - 1)
            continue
        last = min(_power(key, size, least=1).bit_length() - 1, _INTERVALS - 1)
        if first:
            found[:last] = [_power(key, divisions)] * last
            first = False
        found[last] = _power(key, divisions)
    return tuple(found)


def _power(key: str, text: str, least: int = 0) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < least or number & (number - 1):
        raise _refused(key, text, "a power of 2, or a list as [256:1,512:2,>:8]")
    return number


def _whole(key: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise _refused(key, text, f"a whole number of MiB of at least {least}")
    return int(text)


def _refused(key: str, value: str, expected: str) -> SettingsError:
    return SettingsError(f"allocator setting {key}:{value} is not valid: expected {expected}")
