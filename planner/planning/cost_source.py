"""Where the seconds of operations come from: the roofline of a device, or the device at hand."""

import math
from typing import get_args

import torch

from planner.capture.captured_step import CapturedStep
from planner.choices import CostSource
from planner.costs.devices import Device
from planner.costs.eager_timeline import peak_by_shapes
from planner.costs.kernel_timer import MeasuredCosts
from planner.costs.measurement_cache import call_signature
from planner.costs.roofline import Costs, Roofline, roofline
from planner.costs.workspace import WorkspaceMeter
from planner.errors import PlannerError
from planner.progress import Progress
from planner.training_step.recorder import Recording
from planner.training_step.step import unique_storages

MOST_TIMED_SECONDS = 2.0
"""Seconds, by the roofline, of a step's distinct operations that "auto" times. Each is run up to eight times,
and may take some times longer than that."""


class CostsError(PlannerError, ValueError):
    """Costs cannot be had from where they are asked of."""


def check_costs(costs: CostSource, here: torch.device, target: Device, *, at_hand: bool) -> None:
    """See that costs can be had.

    Args:
        costs: The option.
        here: Where the model is.
        target: The device that is planned for.
        at_hand: Whether the one is the other.

    Raises:
        CostsError: There is no such source, or the device is not here.
    """
    if not isinstance(costs, str) or costs not in get_args(CostSource):
        *most, last = map(repr, get_args(CostSource))
        raise CostsError(f"costs={costs!r}: expected {', '.join(most)} or {last}")
    if costs == "measured" and not at_hand:
        raise CostsError(
            f"costs='measured' times operations where the model is, on {here.type}, not on {target.name}: "
            "plan with costs='roofline', or on that device"
        )


def find_costs(
    costs: CostSource,
    captured: CapturedStep,
    target: Device,
    meter: WorkspaceMeter | None,
    progress: Progress,
    most_seconds: float = math.inf,
) -> Costs:
    """The source of seconds for a step.

    "auto" measures where the device is at hand and it takes seconds, and where no other rank plans by itself:
    two ranks that measure make two plans. It begins with what takes longest, and ends after some seconds.

    Args:
        costs: The option.
        captured: The step.
        target: The device that is planned for.
        meter: Runs operations where that device is at hand.
        progress: Called before each operation that is timed.
        most_seconds: How long "auto" measures. What is not known by then has the roofline's seconds.
    """
    known = roofline(target)
    if meter is None or costs == "roofline":
        return known
    if costs == "auto" and (
        _one_of_many_ranks() or _distinct_seconds(captured.eager, known) > MOST_TIMED_SECONDS
    ):
        return known
    there = unique_storages([*captured.parameters, *captured.buffers, *captured.inputs])
    resident = sum(int(tensor.untyped_storage().nbytes()) for tensor in there)
    measured = MeasuredCosts(
        meter,
        known,
        progress=lambda n, name: progress(f"timing operation {n + 1}: {name}", 0.9),
        step_bytes=resident + peak_by_shapes(captured.eager, target),
        most_seconds=most_seconds if costs == "auto" else math.inf,
    )
    meter.measure(captured.eager.calls)  # what runs for long is not run for its time again
    measured.time_largest_first(captured.eager.calls, captured.eager.outputs)
    return measured


def _one_of_many_ranks() -> bool:
    group = torch.distributed
    if not group.is_available():
        return False
    return group.is_torchelastic_launched() or (group.is_initialized() and group.get_world_size() > 1)


def _distinct_seconds(recording: Recording, known: Roofline) -> float:
    """Seconds of the distinct operations of a step, by the roofline."""
    found: dict[str, float] = {}
    for call, output in zip(recording.calls, recording.outputs, strict=True):
        seconds = known.seconds(call.func, call.args, call.kwargs, output)
        if seconds:
            try:
                found[call_signature(call.func, call.args, call.kwargs)] = seconds
            except (TypeError, ValueError):
                continue  # it is not timed either
    return sum(found.values())
