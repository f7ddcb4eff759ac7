"""The step as the user has it today: its timeline, from a recording of the eager step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from planner._torch import operators
from planner.allocator.training_loop import Allocations, step_allocations
from planner.costs.devices import Device, round_bytes
from planner.costs.host_tensors import made_on_host
from planner.costs.made_up.found_elements import told_sizes
from planner.costs.roofline import Costs, roofline
from planner.costs.workspace import NOT_RUN, OpMemory, Workspaces
from planner.heap import collector_off
from planner.training_step.call import Call
from planner.training_step.recorder import Event, Recording
from solvers.model.indices import Step
from solvers.model.schedule import Timeline


@dataclass(frozen=True)
class EagerTimeline(Timeline):
    """A recorded step.

    Attributes:
        allocations: What it allocates, in order.
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
        meter: Measures what kernels allocate inside; None counts nothing.
        costs: Seconds of operations; None for the device's roofline.
        kind: The kind of device of which the allocations are wanted; None for all there are.
    """
    costs = costs or roofline(device)
    calls = recording.calls
    memories = meter.measure(calls) if meter is not None else [NOT_RUN] * len(calls)
    seconds = [
        costs.seconds(call.func, call.args, call.kwargs, output)
        for call, output in zip(calls, recording.outputs, strict=True)
    ]
    name_of, sizes_made = [str(call.func) for call in calls], dict[tuple[int, tuple[int, ...]], list[int]]()
    length = len(recording.events)
    # Lists: to write a single number into an array takes several times as long.
    changes, scratch = [0] * (length + 1), [0] * length
    total_seconds, final = 0.0, 0
    blocks: list[tuple[int, int, int, str]] = []
    sizes_of: dict[int, int] = {}
    for i, event in enumerate(recording.events):
        call = event.call
        assert call is not None
        scratch[i] = memories[call].workspace_bytes
        total_seconds += seconds[call]
        if not event.allocates:
            continue
        storages = [recording.storages[s] for s in event.allocates]
        made = call, tuple([storage.bytes for storage in storages])
        if made not in sizes_made:
            sizes_made[made] = allocated_bytes(event, recording, memories[call], device)
        for number, storage, size in zip(event.allocates, storages, sizes_made[made], strict=True):
            died = storage.died_after
            sizes_of[number] = size
            changes[i] += size
            if size and kind in (None, storage.kind):
                blocks.append((i, length if died is None else max(died, i), size, name_of[call]))
            if died is None:
                final += size
            else:
                changes[max(died, i) + 1] -= size
    live = np.cumsum(np.array(changes[:length], np.int64))
    workspace = np.array(scratch, np.int64)
    total = live + workspace
    peak_step = Step(int(total.argmax())) if length else Step(0)  # counts events, in the order of the step
    start, end, sizes, names = zip(*blocks, strict=True) if blocks else ((), (), (), ())
    backward_from = next((i for i, event in enumerate(recording.events) if event.backward), length)
    allocations = step_allocations(
        start=start,
        end=end,
        sizes=sizes,
        workspace=workspace,
        names=names,
        backward_from=backward_from,
        seconds=[seconds[event.call] for event in recording.events if event.call is not None],
        operations=[name_of[event.call] for event in recording.events if event.call is not None],
    )
    peak = int(total.max(initial=0))
    return EagerTimeline(live, total, peak, peak_step, final, total_seconds, allocations, sizes_of)


def allocated_bytes(event: Event, recording: Recording, memory: OpMemory, device: Device) -> list[int]:
    """Bytes of the storages that an event allocates: as measured, else as shapes say."""
    call = None if event.call is None else recording.calls[event.call]
    sizes = real_sizes(call, memory, [recording.storages[s].bytes for s in event.allocates])
    return [round_bytes(device, size) for size in sizes]


def real_sizes(call: Call | None, memory: OpMemory, sizes: list[int]) -> list[int]:
    """Measured sizes of an operation's outputs where there are as many, else ``sizes``.

    Kernels may reserve more than the shapes without data say (recurrent layers' workspaces). Where data
    decide the sizes, those of the step count if the operation was measured on other data.
    """
    if call is not None and operators.sized_by_data(call.func) and told_sizes(call) is None:
        return sizes
    measured = [size for size in memory.output_bytes if size]
    on_host = made_on_host(call.func) if call is not None else []
    if len(on_host) == len(sizes):
        here = sizes if len(measured) != on_host.count(False) else _spread_out(measured, on_host)
        return [0 if host else size for size, host in zip(here, on_host, strict=True)]
    return measured if len(measured) == len(sizes) else sizes


def _spread_out(sizes: list[int], skipped: list[bool]) -> list[int]:
    rest = iter(sizes)
    return [0 if skip else next(rest) for skip in skipped]
