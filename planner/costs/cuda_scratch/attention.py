"""Scaled dot product attention: accumulators in 32 bits, sums of every row, copies, work split among blocks.

From PyTorch's ``aten/src/ATen/native/transformers/cuda``: ``attention_backward.cu``,
``mem_eff_attention/kernel_backward.h`` (``workspace_size``) and its ``kernels/`` for memory-efficient
attention, ``flash_attn/flash_api.cpp`` (``mha_bwd``, ``set_params_splitkv``) for flash attention. On an H200
memory-efficient attention in 32 and 16 bits, masked or not, and flash attention in 16 bits with dropout
agreed to the byte; keys that are split were not seen. ``cudnn/MHA.cpp`` (``run_cudnn_SDP_bprop``) copies
gradients for cuDNN; cuDNN's own workspace is in no source of PyTorch's. On an H200 with cuDNN 9.19 the
formula agreed to the byte in both types of 16 bits, with masks, dropout, causality, shared keys or without,
up to a width of 128; at 256 half a MiB more was measured, maybe the remainder that the allocator does not
split off.
"""

import math
from dataclasses import dataclass

import torch

from planner.costs.cuda_scratch.layouts import (
    HALF,
    Layout,
    allocated,
    ceil_div,
    copies,
    rounded,
)
from planner.costs.cuda_scratch.processors import Processor
from planner.costs.cuda_scratch.registry import Arguments, scratch_of

_SEED = rounded(8)
_LOCK_BYTES = 16
_FLOAT = torch.float32
_SPLIT_ROWS = 64
_MOST_SPLITS = 128
_SMALL_SHARED_MEMORY = frozenset({(7, 5), (8, 6), (8, 9), (12, 0), (12, 1)})


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of an attention, of tensors in the order of batch, heads, rows and width."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    key_heads: int
    value_width: int

    @classmethod
    def of(cls, query: Layout, key: Layout, value: Layout) -> "_Heads":
        batch, heads, queries, width = query.sizes
        return cls(batch, heads, queries, key.sizes[2], width, key.sizes[1], value.sizes[3])

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.queries


@scratch_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(arguments: Arguments, processor: Processor) -> int:
    """Sums of every row, partial gradients under a lock, and the output's gradient made contiguous."""
    grad = arguments.maybe("grad_out_")
    if grad is None:
        return 0
    query = arguments.layout("query")
    heads = _Heads.of(query, arguments.layout("key"), arguments.layout("value"))
    copied = copies(grad.transposed(1, 2))
    return copied + allocated(heads.rows, _FLOAT) + rounded(_partial_gradients(heads, query.dtype, processor))


def _partial_gradients(heads: _Heads, dtype: torch.dtype, processor: Processor) -> int:
    """The buffers of :file:`kernel_backward.h`: rows by columns of a block, behind a lock."""
    half = dtype in HALF
    widest = max(heads.width, heads.value_width)
    limit = next((k for k in (32, 64, 128) if widest <= k), 1 << 16)
    modern = processor.capability >= (8, 0)
    big = limit > 64 and (modern or half) and processor.capability not in _SMALL_SHARED_MEMORY
    rows = 128 if big else 64
    in_registers = half and limit <= rows
    columns = 128 if in_registers and modern and limit > 64 else 64
    blocks = ceil_div(heads.queries, rows) * ceil_div(heads.width, columns)
    of_queries = blocks * (_LOCK_BYTES + rows * columns * 4)
    of_keys = 0
    if half and not in_registers:
        splits = ceil_div(heads.keys, columns)
        if heads.batch * heads.heads < 256:
            splits = min(splits, max(200 // (heads.batch * heads.heads), 1))
        elif heads.keys <= 2 * columns:
            splits = 1
        padded = sum(ceil_div(width, rows) * rows for width in (heads.width, heads.value_width))
        of_keys = splits * ceil_div(heads.keys, columns) * columns * padded * 4
    return heads.batch * heads.heads * (of_queries + of_keys)


@scratch_of("_scaled_dot_product_flash_attention")
def _flash(arguments: Arguments, processor: Processor) -> int:
    """Where few blocks would leave the GPU idle, keys are split, and results are put together afterwards."""
    query = arguments.layout("query")
    heads = _Heads.of(query, arguments.layout("key"), arguments.layout("value"))
    if arguments["dropout_p"]:
        return _SEED
    columns = 256 if heads.width <= 64 else 128 if heads.width <= 128 else 64
    groups = heads.batch * heads.heads * ceil_div(heads.queries, _SPLIT_ROWS)
    splits = _splits(groups, 2 * processor.multiprocessors, ceil_div(heads.keys, columns))
    if splits <= 1:
        return _SEED
    partial = allocated(splits * heads.rows, _FLOAT)
    return _SEED + partial + allocated(splits * heads.rows * _padded_width(heads.width), _FLOAT)


def _splits(groups: int, processors: int, blocks: int) -> int:
    """Into how many parts keys are split: the fewest with nearly the best use of the multiprocessors."""
    if groups >= 0.8 * processors:
        return 1
    use = {}
    for splits in range(1, min(_MOST_SPLITS, processors, blocks) + 1):
        if splits == 1 or ceil_div(blocks, splits) != ceil_div(blocks, splits - 1):
            waves = groups * splits / processors
            use[splits] = waves / math.ceil(waves)
    best = max(use.values(), default=0.0)
    return next((splits for splits, share in use.items() if share >= 0.85 * best), 1)


@scratch_of("_scaled_dot_product_flash_attention_backward")
def _flash_backward(arguments: Arguments, _processor: Processor) -> int:
    """The queries' gradient in 32 bits, sums of every row, and gradients of keys that heads share."""
    query = arguments.layout("query")
    heads = _Heads.of(query, arguments.layout("key"), arguments.layout("value"))
    copied = copies(arguments.layout("grad_out").transposed(1, 2), arguments.layout("out").transposed(1, 2))
    rows = heads.batch * heads.heads * ceil_div(heads.queries, 128) * 128
    return (
        copied
        + allocated(rows * _padded_width(heads.width), _FLOAT)
        + allocated(rows, _FLOAT)
        + _shared_keys(heads, query.dtype)
    )


@scratch_of("_scaled_dot_product_cudnn_attention")
def _cudnn(_arguments: Arguments, _processor: Processor) -> int:
    return _SEED


@scratch_of("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(arguments: Arguments, _processor: Processor) -> int:
    """As flash attention, unpadded. The output's gradient is copied where its rows are not dense."""
    query, grad = arguments.layout("query"), arguments.layout("grad_out")
    heads = _Heads.of(query, arguments.layout("key"), arguments.layout("value"))
    copied = 0 if grad.strides[-1] == 1 else grad.bytes
    return (
        copied
        + allocated(heads.rows * heads.width, _FLOAT)
        + allocated(heads.rows, _FLOAT)
        + _shared_keys(heads, query.dtype)
        + _SEED
    )


def _shared_keys(heads: _Heads, dtype: torch.dtype) -> int:
    """Gradients of keys and values for every head of the queries, before those that share are added up."""
    if heads.key_heads == heads.heads:
        return 0
    count = heads.batch * heads.heads * heads.keys
    return allocated(count * heads.width, dtype) + allocated(count * heads.value_width, dtype)


def _padded_width(width: int) -> int:
    multiple = 32 if width <= 128 else 64
    return ceil_div(width, multiple) * multiple
