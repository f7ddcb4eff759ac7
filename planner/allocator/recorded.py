"""A snapshot that a user recorded, replayed through the simulated allocator under other settings.

``torch.cuda.memory._record_memory_history()`` keeps every allocation and free, and
``torch.cuda.memory._dump_snapshot("snapshot.pickle")`` writes them.
"""

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from planner.allocator.arena import Arena, Recorder, find_arena
from planner.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from planner.allocator.settings import AllocatorSettings
from planner.errors import PlannerError
from planner.heap import collector_off, read_at_most

_LARGEST_FILE = 4 << 30
_STATES_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")


class SnapshotError(PlannerError, ValueError):
    """A file is no snapshot, or it has no history of the device."""


@dataclass(frozen=True)
class RecordedRun:
    """The events of a device's allocator while its history was recorded.

    Attributes:
        device: The number of the device.
        before: Address, size in bytes and stream of each block that was in use when recording began.
        events: Action, address, size in bytes and stream of each event.
        peak_reserved_bytes: The most bytes that were reserved meanwhile.
    """

    device: int
    before: tuple[tuple[int, int, int], ...]
    events: tuple[tuple[str, int, int, int], ...]
    peak_reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """The result of a recorded run under some settings.

    Attributes:
        reserved_bytes: The most bytes that are reserved.
        allocated_bytes: The most bytes that are in use.
        failed_at: The number of the event that runs out of memory; None if none does.
    """

    reserved_bytes: int
    allocated_bytes: int
    failed_at: int | None = None


_PLAIN = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL"
)
"""The opcodes of pickles of plain data, and those that name a class, so that the error can name it."""


class _Known(dict[int, Any]):
    """By opcode of a pickle: the function that reads it."""

    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"it holds more than plain data (the code {bytes([code])!r})")


class _PlainData(pickle._Unpickler):
    """Snapshots are dictionaries, lists, numbers and text; nothing else is loaded, as it could run code.

    It derives from Python's unpickler that is written in Python, several times slower than the one in C. But
    a file of ten bytes can make the one in C allocate a table of tens of gigabytes.
    """

    dispatch: ClassVar[dict[int, Any]] = _Known(
        {code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, n)[0] for n in _PLAIN.split())}
    )

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which no snapshot does")


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a pickled snapshot; only plain data is loaded from it.

    Raises:
        SnapshotError: The file cannot be read, or is no snapshot.
    """
    shown = os.fspath(path)
    try:
        content = read_at_most(shown, _LARGEST_FILE)
        if len(content) > _LARGEST_FILE:
            raise ValueError(f"it is larger than {_LARGEST_FILE:,} bytes")
        found = _load(io.BytesIO(content))
    except OSError as error:
        raise SnapshotError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # pickles fail in many ways
        why = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__} {error}"
        raise SnapshotError(f"{shown}: is no snapshot of torch.cuda.memory: {why:.300}") from None
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        raise SnapshotError(
            f"{shown}: is no snapshot of torch.cuda.memory: it has no segments and device_traces"
        )
    return found


@collector_off()
def _load(file: BinaryIO) -> Any:
    return _PlainData(file).load()


def recorded_run(snapshot: Mapping[str, Any], device: int | None = None) -> RecordedRun:
    """The history of a device in a snapshot.

    Args:
        snapshot: As :func:`read_snapshot` gives it.
        device: Its number; None for the one with the longest history.

    Raises:
        SnapshotError: There is no history of the device, or the snapshot is not as PyTorch writes it.
    """
    try:
        traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
        if device is None:
            device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
        if not 0 <= device < len(traces) or not traces[device]:
            raise SnapshotError(
                f"there is no history of device {device} in the snapshot: call "
                "torch.cuda.memory._record_memory_history() before what is to be recorded"
            )
        events = tuple(
            (str(e["action"]), _whole(e.get("addr")), _size(e["size"]), _whole(e.get("stream")))
            for e in traces[device]
        )
        segments = [s for s in snapshot["segments"] if int(s.get("device") or 0) == device]
        return RecordedRun(device, _before(segments, events), events, _peak_reserved(segments, events))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(
            f"the snapshot is not as PyTorch writes it: {type(error).__name__}: {str(error)[:200]}"
        ) from None


_MOST_BYTES = 1 << 50
_MOST = 1 << 64


def _whole(value: Any) -> int:
    """An address, or the number of a stream."""
    number = int(value or 0)
    if not -_MOST < number < _MOST:
        raise ValueError("a number is larger than any address")
    return number


def _size(value: Any) -> int:
    """Bytes."""
    if not 0 <= int(value) <= _MOST_BYTES:
        raise ValueError("a size is negative, or larger than any memory")
    return int(value)


_Events = Sequence[tuple[str, int, int, int]]


def _before(segments: Sequence[Mapping[str, Any]], events: _Events) -> tuple[tuple[int, int, int], ...]:
    """The blocks in use when recording began: freed without having been allocated, or still in use."""
    here: dict[int, tuple[int, int]] = {}
    for segment in segments:
        address = _whole(segment["address"])
        for block in segment["blocks"]:
            if block["state"] in _STATES_IN_USE:
                here[address] = (
                    _size(block.get("requested_size") or block["size"]),
                    _whole(segment.get("stream")),
                )
            address += _size(block["size"])
    for action, address, size, stream in reversed(events):
        if action == "free_completed":
            here[address] = (size, stream)
        elif action == "alloc":
            here.pop(address, None)
    return tuple((address, *here[address]) for address in sorted(here))


def _peak_reserved(segments: Sequence[Mapping[str, Any]], events: _Events) -> int:
    now = most = sum(_size(segment["total_size"]) for segment in segments)
    for action, _, size, _ in reversed(events):
        if action in ("segment_alloc", "segment_map"):
            now -= size
        elif action in ("segment_free", "segment_unmap"):
            now += size
        most = max(most, now)
    return most


def replay(run: RecordedRun, settings: AllocatorSettings, memory_bytes: int | None = None) -> Replay:
    """Run recorded events through the simulated allocator.

    Blocks that were in use when recording began are allocated first, by address. The blocks that were cached
    then are not known.

    Args:
        run: The recorded run.
        settings: The settings of the simulated allocator.
        memory_bytes: The memory of the device; None for any amount.
    """
    allocator = CachingAllocator(settings, memory_bytes=memory_bytes)
    here: dict[int, int] = {}
    starts = [("alloc", address, size, stream) for address, size, stream in run.before]
    for number, (action, address, size, stream) in enumerate([*starts, *run.events]):
        try:
            if action == "alloc":
                here[address] = allocator.malloc(size, stream)
            elif action == "free_completed":
                allocator.free(here.pop(address, 0))
        except SimulatedOutOfMemory:
            failed_at = max(number - len(starts), 0)
            return Replay(allocator.peak_reserved_bytes, allocator.peak_allocated_bytes, failed_at)
    return Replay(allocator.peak_reserved_bytes, allocator.peak_allocated_bytes)


def arena_of_run(run: RecordedRun) -> Arena:
    """The segments to reserve before what was recorded, by the allocator's default settings.

    What was in use when recording began is there before them. Of several streams that with the most events
    counts: blocks of others cannot be cut out of the same segments.
    """
    streams = [event[3] for event in run.events if event[0] == "alloc"]
    stream = max(set(streams), key=streams.count, default=0)
    before, after = Recorder(), Recorder()
    numbers = {address: before.malloc(size) for address, size, of in run.before if of == stream}
    after.count_from(before)
    for action, address, size, of in run.events:
        if of != stream:
            continue
        if action == "alloc":
            numbers[address] = after.malloc(size)
        elif action == "free_completed":
            after.free(numbers.pop(address, 0))
    return find_arena(before.events, after.events)
