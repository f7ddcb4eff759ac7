"""Recording a module's training step for a plan that is followed by replaying."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from planner.capture.capture import record_saving
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.parallel.fully_shard import ShardedUnits
from planner.parallel.rank import Rank
from planner.progress import Progress
from planner.replay.recorder import AroundForward, Saved, SavesRecorder
from planner.training_step.step import Step


@dataclass
class ReplayedStep(CapturedStep):
    """A step that was recorded without graphs.

    The recording ``compiled`` holds no saved tensor, ``eager`` holds all of them.

    Attributes:
        saved: Its calls, and the tensors that autograd saves and asks for.
        otherwise_rounded: As of :class:`planner.training_step.recorder.StepRecorder`.
    """

    saved: Saved = field(default_factory=Saved)
    otherwise_rounded: bool = False


def capture_replayed(
    module: torch.nn.Module,
    step: Step,
    progress: Progress | None = None,
    *,
    cuda: CudaKernels | None = None,
    accumulate: bool | None = None,
    rank: Rank | None = None,
) -> ReplayedStep:
    """Record one training step, on a copy of the module; arguments and errors are those of
    :func:`planner.capture.capture.capture`."""
    recorders: list[SavesRecorder] = []

    def recorder_of(copied: torch.nn.Module, sharded: ShardedUnits | None) -> Any:
        def make(*of_step: Any) -> SavesRecorder:
            recorders.append(SavesRecorder(copied, sharded, *of_step))
            return recorders[-1]

        return make

    captured = record_saving(
        module, step, recorder_of, AroundForward, progress, cuda=cuda, accumulate=accumulate, rank=rank
    )
    inherited = {f.name: getattr(captured, f.name) for f in fields(captured)}
    return ReplayedStep(
        **inherited, saved=recorders[-1].saved, otherwise_rounded=recorders[-1].otherwise_rounded
    )
