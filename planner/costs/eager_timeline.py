"""The timeline of the step without a plan, from a recording of the eager step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner._torch import operators
from planner.allocator.training_loop import Allocations, step_allocations
from planner.costs.devices import Device, round_bytes
from planner.costs.host_tensors import made_on_host, on_meta
from planner.costs.made_up.found_elements import told_sizes
from planner.costs.roofline import Costs, roofline
from planner.costs.workspace import NOT_RUN, OpMemory, Workspaces
from planner.heap import collector_off
from planner.training_step.call import Call
from planner.training_step.recorder import Event, Recording
from solvers.model.arrays import Integers
from solvers.model.indices import Step
from solvers.model.schedule import Timeline


@dataclass(frozen=True)
class EagerTimeline(Timeline):
    """The timeline of a recorded step.

    Attributes:
        allocations: Its allocations, in order.
        sizes: Bytes of each recorded storage.
    """

    allocations: Allocations
    sizes: Mapping[int, int] = field(default_factory=dict)


@collector_off()
def eager_timeline(
    recording: Recording,
    device: Device,
    meter: Workspaces | None,
    costs: Costs | None = None,
    kind: str | None = None,
) -> EagerTimeline:
    """The timeline of a step that was recorded operation by operation.

    Args:
        recording: The events and storages of the step.
        device: For seconds and rounding.
        meter: Measures the workspace of kernels; None counts none.
        costs: Seconds of operations; None for the device's roofline.
        kind: Count allocations on this kind of device only; None counts all.
    """
    costs = costs or roofline(device)
    calls = recording.calls
    memories = meter.measure(calls) if meter is not None else [NOT_RUN] * len(calls)
    of_calls = [
        costs.seconds(call.func, call.args, call.kwargs, output)
        for call, output in zip(calls, recording.outputs, strict=True)
    ]
    name_of = [str(call.func) for call in calls]
    ran = [call for event in recording.events if (call := event.call) is not None]
    assert len(ran) == len(recording.events)
    seconds = [of_calls[call] for call in ran]
    made = _Made.of(recording, memories, device)
    live = made.live_bytes()
    workspace = np.array([memory.workspace_bytes for memory in memories], np.int64)[ran]
    total = live + workspace
    length = len(ran)
    peak_step = Step(int(total.argmax())) if length else Step(0)  # counts events, in the order of the step
    counted = made.sizes > 0
    if kind is not None:
        counted &= np.array([recording.storages[s].kind == kind for s in made.storages], np.bool_)
    start = made.start[counted]
    allocations = step_allocations(
        start=start,
        end=made.end[counted],
        sizes=made.sizes[counted],
        workspace=workspace,
        names=[name_of[ran[event]] for event in start.tolist()],
        backward_from=next((i for i, event in enumerate(recording.events) if event.backward), length),
        seconds=seconds,
        operations=[name_of[call] for call in ran],
    )
    return EagerTimeline(
        live,
        total,
        int(total.max(initial=0)),
        peak_step,
        int(made.sizes[made.end == length].sum()),
        sum(seconds),
        allocations,
        dict(zip(made.storages, made.sizes.tolist(), strict=True)),
    )


@collector_off()
def peak_by_shapes(recording: Recording, device: Device) -> int:
    """The most bytes that a recorded step holds at once, by the shapes of tensors, without workspace."""
    events, length = recording.events, len(recording.events)
    made = [recording.storages[s] for event in events for s in event.allocates]
    start = np.repeat(np.arange(length), [len(event.allocates) for event in events])
    died = [length if storage.died_after is None else storage.died_after for storage in made]
    end = np.maximum(start, np.array(died, np.int64))
    sizes = np.array([round_bytes(device, storage.bytes) for storage in made], np.int64)
    return int(_live_bytes(length, start, end, sizes).max(initial=0))


class _Made(NamedTuple):
    """The storages that a step makes.

    Attributes:
        length: The number of events.
        storages: Their numbers, in the order in which they are made.
        sizes: The bytes of each.
        start, end: The event that makes each, and the last event at which it is alive; `length` where nothing
            frees it.
    """

    length: int
    storages: list[int]
    sizes: Integers
    start: Integers
    end: Integers

    @classmethod
    def of(cls, recording: Recording, memories: Sequence[OpMemory], device: Device) -> "_Made":
        held, length = recording.storages, len(recording.events)
        known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        storages: list[int] = []
        sizes: list[int] = []
        start: list[int] = []
        for i, event in enumerate(recording.events):
            if not event.allocates:
                continue
            assert event.call is not None
            key = event.call, tuple([held[s].bytes for s in event.allocates])
            if key not in known:
                known[key] = allocated_bytes(event, recording, memories[event.call], device)
            storages += event.allocates
            sizes += known[key]
            start += [i] * len(event.allocates)
        died = [length if (last := held[s].died_after) is None else last for s in storages]
        starts, ends = np.array(start, np.int64), np.array(died, np.int64)
        return cls(length, storages, np.array(sizes, np.int64), starts, np.maximum(starts, ends))

    def live_bytes(self) -> Integers:
        """The live bytes at each event."""
        return _live_bytes(self.length, self.start, self.end, self.sizes)


def _live_bytes(length: int, start: Integers, end: Integers, sizes: Integers) -> Integers:
    """The live bytes at each of ``length`` events, of storages that live from one event to another."""
    changes = np.zeros(length + 2, np.int64)
    np.add.at(changes, start, sizes)
    np.subtract.at(changes, end + 1, sizes)
    return np.cumsum(changes[:length])


def allocated_bytes(event: Event, recording: Recording, memory: OpMemory, device: Device) -> list[int]:
    """Bytes of the storages that an event allocates: measured ones, or else those of their shapes."""
    call = None if event.call is None else recording.calls[event.call]
    made = [recording.storages[s] for s in event.allocates]
    sizes = real_sizes(call, memory, [s.bytes for s in made], grown=any(s.grown for s in made))
    return [round_bytes(device, size) for size in sizes]


def real_sizes(call: Call | None, memory: OpMemory, sizes: list[int], *, grown: bool = False) -> list[int]:
    """Measured sizes of an operation's outputs, if there are as many, else ``sizes``.

    Kernels may reserve more than the shapes say (recurrent layers' workspaces). Where data decide the sizes
    and the operation was measured on other data, the step's own sizes count. So they do where an output was
    made larger afterwards (``resize_``, ``out=``): ``grown``.
    """
    if grown:
        return sizes
    if call is not None and operators.sized_by_data(call.func) and told_sizes(call) is None:
        return sizes
    if call is not None and not any(sizes) and on_meta(call):
        return sizes  # the measurement ran on the device in place of "meta"
    measured = [size for size in memory.output_bytes if size]
    on_host = made_on_host(call.func) if call is not None else []
    if len(on_host) == len(sizes):
        here = sizes if len(measured) != on_host.count(False) else _spread_out(measured, on_host)
        return [0 if host else size for size, host in zip(here, on_host, strict=True)]
    return measured if len(measured) == len(sizes) else sizes


def _spread_out(sizes: list[int], skipped: list[bool]) -> list[int]:
    rest = iter(sizes)
    return [0 if skip else next(rest) for skip in skipped]
