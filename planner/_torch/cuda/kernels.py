"""The kernels that a CUDA device would run, captured on tensors without data on the CPU.

PyTorch picks operations by device. Where a step is captured on the CPU for a GPU, these picks are corrected
here: dropout (CUDA's fused kernel saves a mask of booleans, the CPU's a mask of floats), attention (CUDA's
kernels save their output and the logarithms of the softmax's sums; ``attention.py`` picks the kernel),
normalisations (``normalisations.py``), and strides of results (``layouts.py``).
Batch normalisation saves a mean and an inverse deviation a channel on both; cuDNN's reserve is empty without
a fused activation.

It works through the Python kernels of operators, which take part where the Python dispatcher is on; as
seen with torch 2.13.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from planner._torch.cuda.attention import AttentionCall, choose_attention, obstacle
from planner._torch.cuda.attention import attend as attend_by
from planner._torch.cuda.layouts import layouts_of_cuda
from planner._torch.cuda.normalisations import fused_normalisations, normalisations_of_cuda
from planner._torch.execution.decompositions import kernels_of_eager
from planner._torch.patches import kernels_replaced
from planner.choices import Attention
from planner.errors import CaptureError

aten = torch.ops.aten

_DECOMPOSED_AT = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@contextlib.contextmanager
def kernels_of_cuda(
    capability: tuple[int, int], attention: Attention | None, *, cudnn: bool = True
) -> Iterator[None]:
    """A context in which operations that are dispatched in Python are those of a CUDA device.

    Args:
        capability: The device's compute capability.
        attention: The attention kernel; None for the one that PyTorch would choose.
        cudnn: Whether the device is one that cuDNN runs on.

    Raises:
        CaptureError: (by the captured code) the attention kernel cannot run on the inputs it is given.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = AttentionCall(
            *(capability, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, cudnn)
        )
        kind = attention or choose_attention(call)
        if why := obstacle(kind, call):
            raise CaptureError(
                f"attention={kind!r} cannot be had: {why}. Leave it out for what PyTorch chooses"
            )
        return attend_by(call, kind)

    chosen: dict[Any, Callable[..., Any]] = normalisations_of_cuda(cudnn)
    chosen[aten.scaled_dot_product_attention.default] = attend
    kernels = {operator: dict.fromkeys(_DECOMPOSED_AT, kernel) for operator, kernel in chosen.items()}
    kernels |= fused_normalisations()
    with kernels_replaced(kernels), layouts_of_cuda(cudnn=cudnn):
        yield


@contextlib.contextmanager
def dispatched_in_python() -> Iterator[None]:
    """A context in which a plain step is dispatched in Python, as AOTAutograd does it, to eager's kernels."""
    with kernels_of_eager(), enable_python_dispatcher():
        yield
