"""What a plan says of the workspace of cuDNN's convolutions, which is not known without the device."""

import numpy as np

from planner.costs.cuda_scratch.convolution import SEEN_ON
from planner.costs.cudnn_workspace import CAP, runs_in_cudnn, workspace_cap
from planner.planfile.budget import format_bytes
from planner.planning.prepared import Prepared
from solvers.model.arrays import PerStep, Schedule
from solvers.model.graph import Graph


def cudnn_note(prepared: Prepared, graph: Graph, schedule: Schedule, step_bytes: PerStep) -> str | None:
    """The text about the workspace that is counted for convolutions, and the most that they can take.

    None if it is measured, or no convolution runs in cuDNN.

    Args:
        prepared: The captured step.
        graph, schedule: The operations, and the order in which they run.
        step_bytes: Live bytes over the step at each operation of the schedule.
    """
    device, captured = prepared.device, prepared.captured
    if prepared.meter is not None or device.kind != "cuda" or not device.cudnn:
        return None
    calls = captured.eager.calls
    count = sum(e.call is not None and runs_in_cudnn(calls[e.call]) for e in captured.eager.events)
    if not count:
        return None
    which = f"{count} convolutions are left" if count > 1 else "1 convolution is left"
    which += " to cuDNN (forward and backward), which is not here to ask for its workspace"
    cap = workspace_cap()
    if cap is not None:
        return f"{which}: each counts with the most that {CAP} allows, {format_bytes(cap)}"
    asked = graph.workspace_bytes
    convolutions = [
        int(count) - int(asked[row])
        for row, count in zip(schedule.tolist(), np.asarray(step_bytes), strict=True)
        if ".convolution" in graph.ops[row].name
    ]
    least = min(convolutions, default=0)
    room = device.memory_bytes - prepared.footprint.around(prepared.resident.total + least)
    counted = "it is not counted"
    if device.capability == SEEN_ON:
        counted = "each counts with what a rule says that fits cuDNN 9.19 on an H200"
    return (
        f"{which}, and {counted}: PyTorch takes the first algorithm whose workspace fits what is "
        f"left of the device, which is at most {format_bytes(max(room, 0))} while one of them runs. With "
        f"{CAP}=256 in the environment of planning and training it is at most 256 MiB, and counted"
    )
