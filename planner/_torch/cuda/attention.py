"""The kernel that PyTorch's scaled dot product attention chooses on CUDA, and its arguments.

The rules are those of ``sdp_utils.cpp``, as read for torch 2.11 and later; they change with versions. There
cuDNN's kernel is the first choice on capability 9 and 10, masks and grouped queries included, where cuDNN is
newer than 9.15. Where PyTorch has no cuDNN, as on a machine that only plans, that of its wheels is assumed.
Kernels that are switched off (``torch.nn.attention.sdpa_kernel``) are not chosen.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch

from planner._torch.compat import version
from planner.choices import Attention
from planner.errors import CaptureError

aten = torch.ops.aten

ATTENTION: tuple[Attention, ...] = get_args(Attention)

# As PyTorch numbers them.
_NUMBERS: dict[int, Attention] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_USUAL_ORDER: tuple[Attention, ...] = ("flash", "efficient", "math", "cudnn")
_LARGEST_FLASH_HEAD = 256
_MASK_ALIGNMENT = 8
"""The memory-efficient kernel reads masks whose strides are multiples of it; others are padded (PyTorch's
``preprocess_mask``, aten/src/ATen/native/transformers/attention.cpp)."""
_OLDEST_PREFERRED_CUDNN = 91500


@dataclass(frozen=True)
class AttentionCall:
    """A call of ``scaled_dot_product_attention``, and where it runs.

    Attributes:
        capability: The device's compute capability.
        cudnn: Whether the device is one that cuDNN runs on: NVIDIA's.
    """

    capability: tuple[int, int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    gqa: bool = False
    cudnn: bool = True

    @property
    def half(self) -> bool:
        """Whether the inputs are of 16 bits."""
        return self.query.dtype in (torch.float16, torch.bfloat16)

    @property
    def differentiated(self) -> bool:
        """Whether it will have a backward."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose_attention(call: AttentionCall) -> Attention:
    """The kernel that PyTorch would choose on CUDA: the first in its order that can run.

    Raises:
        CaptureError: All that could are switched off.
    """
    order = _order(call)
    for kind in order:
        if obstacle(kind, call) is None:
            return kind
    why = "; ".join(f"{kind}: {obstacle(kind, call)}" for kind in order)
    raise CaptureError(
        f"PyTorch has no kernel for this scaled dot product attention on CUDA ({why}). Change its "
        "inputs so that one takes them, or switch one on"
    )


def _order(call: AttentionCall) -> tuple[Attention, ...]:
    numbers = torch._C._get_sdp_priority_order()
    order = tuple(_NUMBERS[number] for number in numbers if number in _NUMBERS)
    preferred = prefers_cudnn(call.capability) and call.cudnn
    if order == _USUAL_ORDER and preferred:
        return ATTENTION
    if order == ATTENTION and not preferred and _here_prefers_cudnn():
        return _USUAL_ORDER  # PyTorch set that order for the device that is here
    return order


def _here_prefers_cudnn() -> bool:
    return torch.cuda.is_available() and prefers_cudnn(torch.cuda.get_device_capability())


def prefers_cudnn(capability: tuple[int, int]) -> bool:
    """Whether PyTorch tries cuDNN's attention first on a device that has cuDNN."""
    if version() < (2, 10) or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    if _cudnn_version() <= _OLDEST_PREFERRED_CUDNN or capability[0] not in (9, 10):
        return False
    toolkit = torch.version.cuda
    return toolkit is None or int(toolkit.partition(".")[0]) >= 13 or capability[1] in (0, 3)


def _cudnn_version() -> int:
    """The version of PyTorch's cuDNN; a recent one where it has none."""
    found = torch.backends.cudnn.version()
    return 99999 if found is None else int(found)


# ---- what each kernel takes ---------------------------------------------------------------------------


def obstacle(kind: Attention, call: AttentionCall) -> str | None:
    """Why a kernel cannot run on these inputs; None where it can."""
    if not _ENABLED[kind]():
        return "it is switched off"
    if kind == "math":
        return None
    query, key, value = call.query, call.key, call.value
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "its inputs must have four dimensions"
    if 0 in (query.shape[-2], key.shape[-2]):
        return "a sequence is empty"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "queries, keys and values must be batches of one size"
    if not query.dtype is key.dtype is value.dtype:
        return "queries, keys and values must have one dtype"
    oldest = (5, 0) if kind == "efficient" else (8, 0)
    if not oldest <= call.capability <= (12, 1):
        major, minor = call.capability
        return f"it needs compute capability {oldest[0]}.{oldest[1]} to 12.1, not {major}.{minor}"
    if why := _heads(kind, call):
        return why
    if not all(t.stride(-1) == 1 or (kind != "efficient" and t.shape[-1] == 1) for t in (query, key, value)):
        return "the last dimension of its inputs must be contiguous"
    return _OBSTACLES[kind](call)


def _heads(kind: Attention, call: AttentionCall) -> str | None:
    heads = [t.shape[-3] for t in (call.query, call.key, call.value)]
    if call.gqa and kind != "efficient":
        whole = heads[0] % heads[1] == heads[0] % heads[2] == 0
        if whole and (heads[1] == heads[2] or kind == "cudnn"):
            return None
        return "the heads of keys and values must divide those of queries"
    return None if len(set(heads)) == 1 else "queries, keys and values must have as many heads"


def _obstacle_of_cudnn(call: AttentionCall) -> str | None:
    if not call.cudnn:
        return "the device has no cuDNN"
    if not call.half:
        return f"it takes half precision, not {call.query.dtype}"
    if call.mask is not None and not _usual_mask(call.mask, call):
        return "its mask must need no gradient and be one for all, or for each batch and head"
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return "it is not deterministic"
    found = _cudnn_version()
    if call.dropout > 0 and 91100 < found < 91400:
        return "cuDNN 9.11 to 9.13 has no dropout in attention"
    if call.dropout * 16 != math.floor(call.dropout * 16):
        return "its dropout must be a multiple of 1/16"
    widths = call.query.shape[-1], call.value.shape[-1]
    if any(width % 8 for width in widths):
        return "the width of its heads must be a multiple of 8"
    if why := _too_wide_for_cudnn(widths, found, call):
        return why
    if call.key.shape[-2] == 1 or (call.dropout > 0 and call.query.shape[-2] == 1):
        return "a sequence has one position"
    return None


def _too_wide_for_cudnn(widths: tuple[int, int], found: int, call: AttentionCall) -> str | None:
    hopper, blackwell = call.capability == (9, 0), call.capability[0] == 10
    if version() >= (2, 14) and (hopper or blackwell) and found > 92200:
        trained = max(widths) <= 128 or widths in ((192, 128), (256, 256))
        if max(widths) > 256 or (call.differentiated and not trained):
            return f"its heads may not be {widths[0]} and {widths[1]} wide"
        return None
    most = 128
    if version() < (2, 14) and hopper and found >= 91000:
        most = 256
    elif (blackwell or (hopper and version() >= (2, 14))) and found >= 91100 and widths == (192, 128):
        most = 192
    return None if max(widths) <= most else f"its heads are at most {most} wide, not {max(widths)}"


def _obstacle_of_flash(call: AttentionCall) -> str | None:
    widths = {t.shape[-1] for t in (call.query, call.key, call.value)}
    if call.mask is not None:
        return "it takes no mask"
    if not call.half:
        return f"it takes half precision, not {call.query.dtype}"
    if len(widths) > 1 or max(widths) > _LARGEST_FLASH_HEAD:
        return f"its heads are of one width of at most {_LARGEST_FLASH_HEAD}, not {max(widths)}"
    wide = 192 < max(widths) <= 224 or (max(widths) > 224 and call.dropout > 0)
    small = (8, 6) <= call.capability <= (8, 9) or call.capability >= (12, 0)
    if call.differentiated and small and wide:
        return f"it has no backward for heads {max(widths)} wide on this device"
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        return "with is_causal there must be as many queries as keys"
    return None


def _obstacle_of_efficient(call: AttentionCall) -> str | None:
    dtype, widths = call.query.dtype, [t.shape[-1] for t in (call.query, call.key, call.value)]
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or (
        dtype is torch.bfloat16 and call.capability < (8, 0)
    ):
        return f"it does not take {dtype} on this device"
    aligned = 4 if call.capability >= (8, 0) else 1
    if call.capability >= ((7, 0) if call.half else (8, 0)):  # matrix units load 16 bytes at once
        aligned = 8 if call.half else 4
    if widths[0] != widths[1] or any(not width or width % aligned for width in widths):
        return f"the width of its heads must be a multiple of {aligned}"
    if call.mask is not None and call.mask.stride(-1) != 1:
        return "the last dimension of its mask must be contiguous"
    return None


def _usual_mask(mask: torch.Tensor, call: AttentionCall) -> bool:
    full = (*call.query.shape[:-1], call.key.shape[-2])
    fits = mask.dim() in (2, 4) and all(
        size in (1, wanted) for size, wanted in zip(mask.shape, full[-mask.dim() :], strict=True)
    )
    return fits and not mask.requires_grad and mask.stride(-1) == 1


_OBSTACLES: dict[Attention, Callable[[AttentionCall], str | None]] = {
    "cudnn": _obstacle_of_cudnn,
    "flash": _obstacle_of_flash,
    "efficient": _obstacle_of_efficient,
}
_ENABLED: dict[Attention, Callable[[], bool]] = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


# ---- what each kernel is called with ---------------------------------------------------------------------


def attend(call: AttentionCall, kind: Attention) -> torch.Tensor:
    """Runs a kernel's operator, with what PyTorch prepares for it."""
    return _KERNELS[kind](call)


def _cudnn(call: AttentionCall) -> torch.Tensor:
    result = aten._scaled_dot_product_cudnn_attention(
        *(call.query, call.key, call.value, _added(call), call.differentiated, call.dropout, call.causal),
        scale=call.scale,
    )
    out: torch.Tensor = result[0]
    return out


def _flash(call: AttentionCall) -> torch.Tensor:
    width = call.query.shape[-1]
    scale = width**-0.5 if call.scale is None else call.scale
    parts = [call.query, call.key, call.value]
    if missing := -width % 8:
        parts = [torch.nn.functional.pad(part, (0, missing)) for part in parts]
    result = aten._scaled_dot_product_flash_attention(*parts, call.dropout, call.causal, False, scale=scale)
    out: torch.Tensor = result[0]
    return out[..., :width] if missing else out


def _efficient(call: AttentionCall) -> torch.Tensor:
    mask = _added(call)
    if mask is not None:
        columns = mask.shape[-1]
        if mask.stride(-1) != 1 or any(step % _MASK_ALIGNMENT for step in mask.stride()[:-1]):
            more = _MASK_ALIGNMENT - columns % _MASK_ALIGNMENT
            mask = torch.nn.functional.pad(mask, (0, more))[..., :columns]
        mask = mask.expand(*call.query.shape[:-1], call.key.shape[-2])  # one a head
    result = aten._scaled_dot_product_efficient_attention(
        *(call.query, call.key, call.value, mask, call.differentiated, call.dropout, call.causal),
        scale=call.scale,
    )
    out: torch.Tensor = result[0]
    return out


def _added(call: AttentionCall) -> torch.Tensor | None:
    """The mask as numbers to add."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    zero = torch.zeros((), dtype=call.query.dtype, device=call.mask.device)
    return torch.where(call.mask, zero, float("-inf"))


def _math(call: AttentionCall) -> torch.Tensor:
    result = aten._scaled_dot_product_attention_math(
        *(call.query, call.key, call.value, call.mask, call.dropout, call.causal, None),
        scale=call.scale,
        enable_gqa=call.gqa,
    )
    out: torch.Tensor = result[0]
    return out


_KERNELS: dict[Attention, Callable[[AttentionCall], torch.Tensor]] = {
    "cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math,
}  # fmt: skip
