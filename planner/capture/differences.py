"""What differs between a planned step and the one that the user has, in words."""

from collections.abc import Sequence

import torch

from planner.capture.captured_step import CudaKernels
from planner.capture.external_accumulation import reordered_views, sums_between_graphs
from planner.capture.graphs.graph_runner import GraphRunner
from planner.capture.recurrent_layers import RecurrentCalls
from planner.hooks.autocast_cast_cache import SHARED_WEIGHT_WARNING
from planner.training_step.recorder import Recording

_RECURRENT = (torch.nn.RNNBase, torch.nn.LSTMCell, torch.nn.GRUCell)
_OF_CPU = ("mkldnn", "_for_cpu", "_cpu_")
"""Names of kernels that only the CPU has contain one of these."""


def other_order(recording: Recording, runners: Sequence[GraphRunner]) -> list[str]:
    """What to say where gradients pass between graphs in another order, or layout, than eager's."""
    found = []
    sums = len(sums_between_graphs(recording, runners)) + reordered_views(runners)
    relaid = sum(r.gradients.relaid(r.joint) for r in runners if r.joint is not None)
    if sums or relaid:
        found.append(
            "gradients between graphs, of views, or of weights in use_reentrant=True checkpoints, "
            "are added up in another order, or have other strides, than without a plan "
            f"({sums + relaid}): they may differ in the last bits. planner.verify() tells"
        )
    if any(r.casts.again for r in runners):
        found.append(SHARED_WEIGHT_WARNING)
    return found


def cpu_kernels(
    recording: Recording,
    runners: Sequence[GraphRunner],
    module: torch.nn.Module,
    recurrent: RecurrentCalls,
    cuda: CudaKernels,
) -> list[str]:
    """What to say where a GPU would run another kernel than the one that is planned."""
    joints = [runner.joint for runner in runners if runner.joint is not None]
    calls = [*(c.func for c in recording.calls), *(op.node.target for j in joints for op in j.ops)]
    names = {name for name in map(str, calls) if any(part in name for part in _OF_CPU)}
    names |= {type(m).__name__ for m in module.modules() if isinstance(m, _RECURRENT)}
    if not names:
        return []
    return [
        f"a GPU has kernels of its own for {', '.join(sorted(names))}; the plan counts the memory of "
        "the CPU's. Plan such a step where the GPU is"
        + (f"; {recurrent}" if recurrent.kept_bytes and cuda.cudnn else "")
    ]
