"""The workspace of cuDNN's convolutions on a GPU that is not here.

On the device cuDNN proposes algorithms for a convolution, each with its workspace. PyTorch takes the first
whose workspace can be allocated, in the order of cuDNN's heuristics or, with
``torch.backends.cudnn.benchmark`` on, of measured time: see Conv_v8.cpp in PyTorch's
``aten/src/ATen/native/cudnn``. So the only bound is the device's free memory, unless the environment sets
one: ``CUDNN_CONV_WSCAP_DBG``, in MiB, is the most that cuDNN asks for (since 8.0.5). Depthwise convolutions
of 32 or 64 bits in contiguous tensors run PyTorch's own kernels, which ask for none.
"""

import os

import torch

from planner._torch.operators import OpOverload
from planner.training_step.call import Call

CAP = "CUDNN_CONV_WSCAP_DBG"
_IMAGE = {
    torch.ops.aten.convolution: 0,
    torch.ops.aten._convolution: 0,
    torch.ops.aten.convolution_backward: 1,
}
"""The position of the image among the arguments; the weight is the next, the groups are eight behind."""


def workspace_cap() -> int | None:
    """Bytes that the environment allows a convolution's workspace; None where it says nothing."""
    text = os.environ.get(CAP, "").strip()
    return int(text) << 20 if text.isdecimal() else None


def runs_in_cudnn(call: Call) -> bool:
    """Whether a call is a convolution that PyTorch may leave to cuDNN."""
    position = _IMAGE.get(call.func.overloadpacket) if isinstance(call.func, OpOverload) else None
    if position is None:
        return False
    image, weight = call.args[position : position + 2]
    transposed, groups = call.args[position + 6], call.args[position + 8]
    depthwise = not transposed and 1 < groups == image.shape[1]
    small = max(image.numel(), weight.numel()) < 2**31
    wide = image.dtype in (torch.float32, torch.float64)
    return not (depthwise and small and wide and image.is_contiguous() and weight.is_contiguous())
