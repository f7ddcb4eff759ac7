"""A snapshot that a user recorded, replayed through the simulated allocator under other settings.

``torch.cuda.memory._record_memory_history()`` keeps every allocation and free, and
``torch.cuda.memory._dump_snapshot("snapshot.pickle")`` writes them.
"""

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from planner.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from planner.allocator.settings import AllocatorSettings
from planner.errors import PlannerError

_LARGEST_FILE = 4 << 30
_STATES_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")


class SnapshotError(PlannerError, ValueError):
    """A file is no snapshot, or it has no history of the device."""


@dataclass(frozen=True)
class RecordedRun:
    """What a device's allocator did while its history was recorded.

    Attributes:
        device: Its number.
        before: Address, size and stream of what was in use when recording began.
        events: Action, address, size and stream of each event.
        peak_reserved_bytes: The most that was reserved at any time of it.
    """

    device: int
    before: tuple[tuple[int, int, int], ...]
    events: tuple[tuple[str, int, int, int], ...]
    peak_reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """A recorded run under some settings.

    Attributes:
        reserved_bytes: The most that is reserved.
        allocated_bytes: The most that is in use.
        failed_at: The number of the event that is out of memory; None where none is.
    """

    reserved_bytes: int
    allocated_bytes: int
    failed_at: int | None = None


class _PlainData(pickle.Unpickler):
    """Snapshots are dictionaries, lists, numbers and text; nothing else is loaded, as it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which no snapshot does")


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a pickled snapshot; only plain data is loaded from it.

    Raises:
        SnapshotError: The file cannot be read, or is no snapshot.
    """
    shown = os.fspath(path)
    try:
        with open(shown, "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        found = _load(io.BytesIO(content))
    except OSError as error:
        raise SnapshotError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # pickles fail in many ways
        raise SnapshotError(f"{shown}: is no snapshot of torch.cuda.memory: {error}") from None
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        raise SnapshotError(
            f"{shown}: is no snapshot of torch.cuda.memory: it has no segments and device_traces"
        )
    return found


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
        if device >= len(traces) or not traces[device]:
            raise SnapshotError(
                f"there is no history of device {device} in the snapshot: call "
                "torch.cuda.memory._record_memory_history() before what is to be recorded"
            )
        events = tuple(
            (str(e["action"]), int(e.get("addr") or 0), int(e["size"]), int(e.get("stream") or 0))
            for e in traces[device]
        )
        segments = [s for s in snapshot["segments"] if int(s.get("device") or 0) == device]
        return RecordedRun(device, _before(segments, events), events, _peak_reserved(segments, events))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(
            f"the snapshot is not as PyTorch writes it: {type(error).__name__}: {error}"
        ) from None


_Events = Sequence[tuple[str, int, int, int]]


def _before(segments: Sequence[Mapping[str, Any]], events: _Events) -> tuple[tuple[int, int, int], ...]:
    """What was in use when recording began: it was freed without having been allocated, or is still there."""
    here: dict[int, tuple[int, int]] = {}
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] in _STATES_IN_USE:
                here[address] = (
                    int(block.get("requested_size") or block["size"]),
                    int(segment.get("stream") or 0),
                )
            address += int(block["size"])
    for action, address, size, stream in reversed(events):
        if action == "free_completed":
            here[address] = (size, stream)
        elif action == "alloc":
            here.pop(address, None)
    return tuple((address, *here[address]) for address in sorted(here))


def _peak_reserved(segments: Sequence[Mapping[str, Any]], events: _Events) -> int:
    now = most = sum(int(segment["total_size"]) for segment in segments)
    for action, _, size, _ in reversed(events):
        if action in ("segment_alloc", "segment_map"):
            now -= size
        elif action in ("segment_free", "segment_unmap"):
            now += size
        most = max(most, now)
    return most


def replay(run: RecordedRun, settings: AllocatorSettings, memory_bytes: int | None = None) -> Replay:
    """Run what was recorded through the simulated allocator.

    What was in use when recording began is allocated first, by address: what was cached then is not known.

    Args:
        run: The recorded run.
        settings: Of the allocator.
        memory_bytes: What the device has; None for any amount.
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
