"""The predicted memory of a training loop, in the forms that PyTorch's and Chrome's viewers open.

A *snapshot* is what ``torch.cuda.memory._snapshot()`` returns: segments with their blocks, and the history
of events. Pickled, https://pytorch.org/memory_viz and ``python -m torch.cuda._memory_viz`` open it. A *Chrome
trace* is JSON that https://ui.perfetto.dev and ``chrome://tracing`` open.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.allocator.caching_allocator import CachingAllocator, TraceEntry
from planner.allocator.settings import AllocatorSettings
from planner.allocator.training_loop import Allocations, Moment, TrainingLoop, run


@dataclass(frozen=True)
class RecordedLoop:
    """A loop that ran through the simulated allocator.

    Attributes:
        allocator: The allocator, in its state at the end.
        trace: Its events.
        moments: The place in the loop of each event.
        seconds: The time of each event, from the beginning of the first step.
        allocated_bytes, reserved_bytes: The bytes in use and reserved after each event.
    """

    allocator: CachingAllocator
    trace: list[TraceEntry]
    moments: list[Moment]
    seconds: list[float]
    allocated_bytes: list[int]
    reserved_bytes: list[int]


def record(loop: TrainingLoop, settings: AllocatorSettings | None = None) -> RecordedLoop:
    """Run a loop through the simulated allocator, and note each of its events."""
    trace: list[TraceEntry] = []
    allocator = CachingAllocator(settings, trace=trace)
    moments: list[Moment] = []
    seconds: list[float] = []
    allocated: list[int] = []
    reserved: list[int] = []
    clock = _Clock()
    moment = Moment("resident", "")

    def note() -> None:
        new = len(trace) - len(moments)
        moments.extend([moment] * new)
        seconds.extend([clock.at(moment)] * new)
        allocated.extend([allocator.allocated_bytes] * new)
        reserved.extend([allocator.reserved_bytes] * new)

    for following in run(loop, allocator):
        note()
        if moment.phase == "arena":  # it was empty: a planned module has the peak counted anew
            allocator.peak_allocated_bytes = allocator.allocated_bytes
        moment = following
    note()
    return RecordedLoop(allocator, trace, moments, seconds, allocated, reserved)


class _Clock:
    """Finds the seconds at which operations begin, one after the other."""

    def __init__(self) -> None:
        self._now, self._run, self._begin = 0.0, None, 0.0
        self._starts: dict[int, list[float]] = {}

    def at(self, moment: Moment) -> float:
        if moment.sequence is None:
            self._run = None
            return self._now
        starts = self.starts_of(moment.sequence)
        key: Any = (moment.step, id(moment.sequence))
        if key != self._run:
            self._run, self._begin = key, self._now
        self._now = self._begin + starts[-1]
        return self._begin + starts[min(moment.operation, len(starts) - 1)]

    def starts_of(self, sequence: Allocations) -> list[float]:
        """Seconds from the first operation to each."""
        if id(sequence) not in self._starts:
            starts = [0.0]
            for taken in sequence.seconds or [1e-6] * len(sequence.workspace):
                starts.append(starts[-1] + taken)
            self._starts[id(sequence)] = starts
        return self._starts[id(sequence)]


def snapshot(recorded: RecordedLoop) -> dict[str, Any]:
    """The dictionary that ``torch.cuda.memory._snapshot()`` would return at the end of the loop."""
    frames: dict[int, list[dict[str, Any]]] = {}
    events = []
    for (action, address, size, stream), moment, seconds in zip(
        recorded.trace, recorded.moments, recorded.seconds, strict=True
    ):
        stack = _frames(moment)
        if action == "alloc":
            frames[address] = stack
        event = {"action": action, "addr": address, "size": size, "stream": stream, "frames": stack}
        events.append(
            event | {"time_us": round(seconds * 1e6), "compile_context": "N/A", "user_metadata": ""}
        )
    return {
        "segments": [_segment(blocks, frames) for blocks in recorded.allocator.segments()],
        "device_traces": [events],
        "allocator_settings": {"expandable_segments": recorded.allocator.settings.expandable_segments},
        "external_annotations": [],
    }


def _segment(blocks: Sequence[Any], frames: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    used = [block for block in blocks if block.used]
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in used),
        "active_size": sum(block.size for block in used),
        "requested_size": sum(block.requested for block in used),
        "stream": blocks[0].stream,
        "segment_type": "small" if blocks[0].pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": blocks[0].expandable is not None,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated" if block.used else "inactive",
                "frames": frames.get(block.address, []) if block.used else [],
            }
            for block in blocks
        ],
    }


def _frames(moment: Moment) -> list[dict[str, Any]]:
    """The frames that a viewer shows as the stack: the operation, its module, the phase of the step."""
    name, _, module = moment.what.partition(" @ ")
    phase = (
        f"{moment.phase} of step {moment.step + 1}" if moment.phase != "resident" else "before the first step"
    )
    frames = [{"name": name or moment.phase, "filename": module or "model", "line": max(moment.operation, 0)}]
    return [*frames, {"name": phase, "filename": "predicted by planner", "line": 0}]


def chrome_trace(recorded: RecordedLoop) -> dict[str, Any]:
    """The loop as a Chrome trace: operations by their predicted times, allocated and reserved bytes."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "predicted training loop"}},
        {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "operations"}},
    ]
    done: set[tuple[int, int]] = set()
    clock = _Clock()
    for moment in recorded.moments:
        begin = clock.at(moment)
        if moment.sequence is not None and (moment.step, id(moment.sequence)) not in done:
            done.add((moment.step, id(moment.sequence)))
            # The first event may be of a later operation than the first.
            events += _slices(moment, begin - clock.starts_of(moment.sequence)[moment.operation])
    for seconds, allocated, reserved in zip(
        recorded.seconds, recorded.allocated_bytes, recorded.reserved_bytes, strict=True
    ):
        sizes = {"allocated": allocated, "reserved": reserved}
        events.append({"ph": "C", "pid": 0, "ts": seconds * 1e6, "name": "memory (bytes)", "args": sizes})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slices(moment: Moment, begin: float) -> Iterator[dict[str, Any]]:
    sequence = moment.sequence
    assert sequence is not None
    now = begin
    for number, (name, taken) in enumerate(zip(sequence.operations, sequence.seconds, strict=True)):
        phase = moment.phase
        if phase != "optimizer":
            phase = "backward" if number >= sequence.backward_from else "forward"
        operation, _, module = name.partition(" @ ")
        if taken > 0:
            yield {
                "ph": "X", "pid": 0, "tid": 1, "ts": now * 1e6, "dur": taken * 1e6, "name": operation,
                "cat": phase, "args": {"module": module, "step": moment.step + 1},
            }  # fmt: skip
        now += taken
