"""Predicts the scratch memory of calls on a device that this machine does not have."""

import logging
from collections.abc import Iterable

from planner._torch.operators import OpOverload
from planner.costs.cuda_scratch.processors import Processor, processor_of
from planner.costs.cuda_scratch.registry import FORMULAS, Arguments
from planner.costs.cudnn_workspace import runs_in_cudnn, workspace_cap
from planner.costs.devices import Device
from planner.costs.workspace import NOT_RUN, OpMemory
from planner.training_step.call import Call

logger = logging.getLogger(__name__)


class CudaScratch:
    """Scratch memory by formulas; for cuDNN's convolutions the most that the environment allows."""

    def __init__(self, processor: Processor, cap_bytes: int | None) -> None:
        """
        Args:
            processor: Where the calls would run.
            cap_bytes: The most that the environment lets a convolution ask for; None if it sets no bound.
        """
        self._processor = processor
        self._capped = None if cap_bytes is None else OpMemory(cap_bytes, ())

    def measure(self, calls: Iterable[Call]) -> list[OpMemory]:
        """The memory of each call, in order."""
        return [self._of(call) for call in calls]

    def _of(self, call: Call) -> OpMemory:
        if self._capped is not None and runs_in_cudnn(call):
            return self._capped
        formula = FORMULAS.get(call.func.overloadpacket) if isinstance(call.func, OpOverload) else None
        if formula is None:
            return NOT_RUN
        try:
            scratch = formula(Arguments(call), self._processor)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # sizes data decide
            logger.debug("no scratch known for %s: %s", call.func, error)
            return NOT_RUN
        return OpMemory(scratch, ()) if scratch else NOT_RUN


def cuda_scratch(device: Device) -> CudaScratch | None:
    """The prediction for an NVIDIA GPU that this machine does not have; None for other devices."""
    if device.kind != "cuda" or not device.cudnn:
        return None
    return CudaScratch(processor_of(device), workspace_cap())
