"""The second private room: what a CUDA device would run, captured on tensors without data on the CPU.

PyTorch picks operations by device. Where a step is captured on the CPU for a GPU, two picks change what
is saved for the backward, and are put right here: dropout (CUDA's fused kernel saves a mask of booleans,
the CPU's a mask of floats) and attention (CUDA's kernels save their output and the logarithms of the
softmax's sums). Batch normalisation saves a mean and an inverse deviation a channel on both; cuDNN's
reserve is empty without a fused activation.

It works through the Python kernels of operators, which take part where the Python dispatcher is on; as
seen with torch 2.13.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch._dispatch.python import enable_python_dispatcher

from planner._torch_joint import kernels_of_eager
from planner.errors import CaptureError

aten = torch.ops.aten

Attention = Literal["flash", "efficient", "math"]
ATTENTION: tuple[Attention, ...] = get_args(Attention)

_DECOMPOSED_AT = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
_LARGEST_FLASH_HEAD = 256
_MASK_ALIGNMENT = 16
"""Columns of an attention mask that the memory-efficient kernel loads at once; others are padded to it."""


@contextlib.contextmanager
def kernels_of_cuda(capability: tuple[int, int], attention: Attention | None) -> Iterator[None]:
    """Within this, operations that are dispatched in Python are those of a CUDA device.

    Args:
        capability: The device's compute capability.
        attention: The attention kernel; None for the one that PyTorch would choose.

    Raises:
        CaptureError: (by the captured code) the attention kernel cannot run on the inputs it is given.
    """

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _attend(capability, attention, *args, **kwargs)

    operator = aten.scaled_dot_product_attention.default
    taken = dict(operator.py_kernels)
    try:
        operator.py_kernels.update(dict.fromkeys(_DECOMPOSED_AT, attend))
        operator._dispatch_cache.clear()
        yield
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(taken)
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def dispatched_in_python() -> Iterator[None]:
    """Within this a plain step is dispatched in Python, as AOTAutograd does it, to eager's kernels."""
    with kernels_of_eager(), enable_python_dispatcher():
        yield


def choose_attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> Attention:
    """The kernel that PyTorch's ``scaled_dot_product_attention`` would choose on CUDA.

    In its order: flash, memory-efficient, plain arithmetic. cuDNN's kernel, which some versions prefer
    on some devices, saves what flash does.
    """
    return next(kind for kind in ATTENTION if not _obstacle(kind, capability, query, key, value, mask))


def _obstacle(
    kind: Attention,
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> str | None:
    """Why a kernel cannot run on these inputs; None where it can."""
    if kind == "math":
        return None
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "its inputs must have four dimensions"
    if 0 in (query.shape[-2], key.shape[-2]):
        return "a sequence is empty"
    width = max(query.shape[-1], value.shape[-1])
    if kind == "flash":
        if capability < (8, 0):
            return f"it needs compute capability 8.0, not {capability[0]}.{capability[1]}"
        if mask is not None:
            return "it takes no mask"
        if not half:
            return f"it takes half precision, not {query.dtype}"
        if width > _LARGEST_FLASH_HEAD:
            return f"its heads are at most {_LARGEST_FLASH_HEAD} wide, not {width}"
        return None
    if query.dtype is torch.float64 or (query.dtype is torch.bfloat16 and capability < (8, 0)):
        return f"it does not take {query.dtype} on this device"
    if query.shape[-3] != key.shape[-3]:
        return "queries and keys must have as many heads"
    matrix_units = capability >= ((7, 5) if half else (8, 0))
    aligned = (4 if half else 1) * (1 if not matrix_units else 2 if half else 4)
    if query.shape[-1] % aligned or value.shape[-1] % aligned:
        return f"the width of its heads must be a multiple of {aligned}"
    return None


def _attend(
    capability: tuple[int, int],
    wanted: Attention | None,
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
    kind = wanted or choose_attention(capability, query, key, value, attn_mask)
    if obstacle := _obstacle(kind, capability, query, key, value, attn_mask):
        raise CaptureError(f"attention={kind!r} cannot be had: {obstacle}")
    return _KERNELS[kind](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    dropout: float,
    causal: bool,
    scale: float | None,
    _gqa: bool,
) -> torch.Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if missing := -width % 8:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
    result = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
    out: torch.Tensor = result[0]
    return out[..., :width] if missing else out


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    _gqa: bool,
) -> torch.Tensor:
    if mask is not None:
        mask = _prepared_mask(mask, query, key)
    grad = any(t.requires_grad for t in (query, key, value))
    result = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, grad and torch.is_grad_enabled(), dropout, causal, scale=scale
    )
    out: torch.Tensor = result[0]
    return out


def _prepared_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """As numbers to add, with rows at aligned addresses, expanded to one a head."""
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, float("-inf"))
    columns = mask.shape[-1]
    if missing := -columns % _MASK_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :columns]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    result = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=gqa
    )
    out: torch.Tensor = result[0]
    return out


_KERNELS: dict[Attention, Callable[..., torch.Tensor]] = {
    "flash": _flash, "efficient": _efficient, "math": _math,
}  # fmt: skip
