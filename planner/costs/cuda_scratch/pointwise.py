"""Losses, softmax and resampling: elements that are reduced afterwards, and contiguous copies.

From PyTorch's ``aten/src/ATen/native``: ``cuda/Loss.cu`` and ``BinaryOps`` (losses of every element, then
their mean or sum), ``cuda/SoftMax.cu`` (``host_softmax``, ``host_softmax_backward``; the gradient of softmax
begins with a product of its inputs), ``SoftMax.cpp`` (``_safe_softmax``), ``cuda/LossCTC.cu``,
``cuda/UpSampleNearest2d.cu``, ``cuda/UpSampleBilinear2d.cu``, ``Pow.cpp``. On an H200 all of them agreed to
the byte.
"""

import torch

from planner._torch.fake import concrete_size
from planner.costs.cuda_scratch.layouts import Layout, allocated, copies
from planner.costs.cuda_scratch.processors import Processor
from planner.costs.cuda_scratch.reductions import reduction_scratch
from planner.costs.cuda_scratch.registry import Arguments, scratch_of

_SCALAR = allocated(1, torch.float32)
_ONE_INTEGER = torch.int64


@scratch_of("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
def _loss(arguments: Arguments, processor: Processor) -> int:
    """The loss of every element, unless the call returns these itself."""
    source, target = arguments.layout("self"), arguments.layout("target")
    if not concrete_size(arguments["reduction"]):
        return 0
    losses = source if source.elements >= target.elements else target
    dense = Layout((losses.elements,), (1,), source.dtype)
    element_bytes = 8 if source.dtype is torch.float64 else 4
    return dense.bytes + reduction_scratch(dense, [0], element_bytes, processor)


@scratch_of("_softmax", "_log_softmax")
def _softmax(arguments: Arguments, _processor: Processor) -> int:
    return copies(arguments.layout("self"))


@scratch_of("_log_softmax_backward_data")
def _log_softmax_backward(arguments: Arguments, _processor: Processor) -> int:
    return copies(arguments.layout("grad_output"), arguments.layout("output"))


@scratch_of("_softmax_backward_data")
def _softmax_backward(arguments: Arguments, _processor: Processor) -> int:
    """The product of gradient and result, made contiguous, and the result."""
    grad, output = arguments.layout("grad_output"), arguments.layout("output")
    product = grad.bytes
    return product + (0 if grad.contiguous else grad.bytes) + copies(output)


@scratch_of("_safe_softmax")
def _safe_softmax(arguments: Arguments, _processor: Processor) -> int:
    """Which elements are masked, and which rows are so wholly."""
    source = arguments.layout("self")
    if not source.sizes or not source.elements:
        return 0
    length = source.sizes[concrete_size(arguments["dim"]) % len(source.sizes)]
    elements = source.elements
    return allocated(elements, torch.bool) + allocated(elements // length, torch.bool) + _SCALAR


@scratch_of("_ctc_loss")
def _ctc_loss(arguments: Arguments, _processor: Processor) -> int:
    """Lengths of inputs and targets, and where these begin."""
    batch = arguments.layout("log_probs").sizes[1]
    return 3 * allocated(batch, _ONE_INTEGER)


@scratch_of("_ctc_loss_backward")
def _ctc_loss_backward(arguments: Arguments, _processor: Processor) -> int:
    """The same, and probabilities from the end."""
    alpha = arguments.layout("log_alpha")
    batch = arguments.layout("log_probs").sizes[1]
    return alpha.bytes + 3 * allocated(batch, _ONE_INTEGER)


@scratch_of(
    "upsample_nearest2d_backward",
    "_upsample_nearest_exact2d_backward",
    "upsample_bilinear2d_backward",
)
def _upsample_backward(arguments: Arguments, _processor: Processor) -> int:
    """The gradient is made dense in its own memory format; to the same size it is only copied."""
    grad = arguments.layout("grad_output")
    sizes = tuple(concrete_size(size) for size in arguments["input_size"])
    if sizes == grad.sizes or (grad.seems_channels_last and grad.channels_last):
        return 0
    return copies(grad) if not grad.seems_channels_last else grad.bytes


@scratch_of("pow")
def _pow(arguments: Arguments, _processor: Processor) -> int:
    """A number to the power of a tensor is a tensor first."""
    return 0 if isinstance(arguments["self"], torch.Tensor) else _SCALAR
