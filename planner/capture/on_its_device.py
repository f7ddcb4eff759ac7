"""Running a copy with the kernels of the device that will train, which need not be here."""

import contextlib

from planner._torch.autocast_state import autocast_regions
from planner._torch.cuda.autocast import autocast_of_cuda
from planner._torch.cuda.kernels import kernels_of_cuda
from planner.capture.captured_step import CudaKernels


def as_on_its_device(cuda: CudaKernels | None, stack: contextlib.ExitStack) -> list[str]:
    """Let a copy run the kernels of its device until the contexts of ``stack`` end.

    Returns the regions of autocast around the step; the list grows while it runs.
    """
    if cuda is None:
        return autocast_regions()
    stack.enter_context(kernels_of_cuda(cuda.capability, cuda.attention, cudnn=cuda.cudnn))
    return stack.enter_context(autocast_of_cuda())
