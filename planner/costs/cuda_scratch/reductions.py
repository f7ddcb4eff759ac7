"""Sums and other reductions: partial results of several thread blocks, in global memory.

From PyTorch's ``aten/src/ATen/native/cuda/Reduce.cuh`` (``setReduceConfig``, ``global_memory_size``,
``semaphore_size``), the order of dimensions from ``aten/src/ATen/TensorIterator.cpp``, and the copy of
inputs of another dtype from ``make_reduction`` in ``aten/src/ATen/native/ReduceOpsUtils.h``: floats of 16
bits that are added up as 32 are read as they are. On an H200 sums agreed to the byte (but for what the
allocator does not split off).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from planner._torch.fake import concrete_size
from planner.costs.cuda_scratch.layouts import HALF, Layout, accumulated, allocated, ceil_div, rounded, summed
from planner.costs.cuda_scratch.processors import Processor
from planner.costs.cuda_scratch.registry import Arguments, scratch_of

_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    stride: int
    output_stride: int


def reduction_scratch(source: Layout, dims: Collection[int], element_bytes: int, processor: Processor) -> int:
    """Bytes of the partial results that thread blocks exchange, and of their counters.

    Args:
        source: The layout of the tensor.
        dims: The dimensions to reduce, not negative; if there are none, all.
        element_bytes: Size of an accumulated value.
        processor: Where it runs.
    """
    if not source.elements:
        return 0
    reduced, kept = _dimensions(source, dims or range(len(source.sizes)))
    outputs, inputs = prod(d.size for d in kept), prod(d.size for d in reduced)
    across = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)  # threads share an output
    width, height, vector = inputs, outputs, 1
    if across:
        if reduced and reduced[0].stride == 1 and width > 128 and len(reduced) == 1:
            width //= 4
    else:
        width, height = outputs, inputs
        if kept[0].stride == 1:
            vector = _vector(source, reduced, kept)
            width //= vector
    block_width, block_height = _block(width, height, _MOST_THREADS // vector)
    step_input, step_output = (block_width, 1) if across else (1, block_width * vector)
    values = ceil_div(inputs, step_input)
    if values < min(block_height * 16, _MOST_VALUES):
        return 0  # each warp has outputs of its own
    step_input *= block_height
    values = ceil_div(inputs, step_input)
    grid = ceil_div(outputs, step_output)
    target = processor.multiprocessors * (processor.threads // (block_width * block_height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = min(ceil_div(target, grid), ceil_div(values, _LEAST_VALUES))
    blocks = max(blocks, ceil_div(values, _MOST_VALUES))
    if blocks <= 1:
        return 0
    partial = element_bytes * outputs * blocks * (1 if across else block_width * vector)
    return rounded(partial) + rounded(_SEMAPHORE_BYTES * grid)


def reduced_dims(given: Any, ndim: int) -> list[int]:
    """The dimensions that an argument names, not negative; all where it names none."""
    if given is None:
        return list(range(ndim))
    named = given if isinstance(given, (list, tuple)) else [given]
    return [concrete_size(d) % max(ndim, 1) for d in named] or list(range(ndim))


@scratch_of("sum", "mean", "nansum", "prod")
def _sums(arguments: Arguments, processor: Processor) -> int:
    source = arguments.layout("self")
    made = summed(source, arguments.get("dtype"))
    cast = 0
    if made is not source.dtype and not (source.dtype in HALF and made is torch.float32):
        cast = allocated(source.elements, made)
        source = Layout(source.sizes, source.strides, made)
    dims = reduced_dims(arguments.get("dim"), len(source.sizes))
    return cast + reduction_scratch(source, dims, accumulated(made).itemsize, processor)


@scratch_of("amax", "amin", "linalg_vector_norm", "norm")
def _values(arguments: Arguments, processor: Processor) -> int:
    source = arguments.layout("self")
    dims = reduced_dims(arguments.get("dim"), len(source.sizes))
    return reduction_scratch(source, dims, accumulated(source.dtype).itemsize, processor)


@scratch_of("logsumexp")
def _logarithms_of_sums(arguments: Arguments, processor: Processor) -> int:
    """The maximum of each row, and the exponentials of all elements less it (``ReduceOps.cpp``)."""
    source = arguments.layout("self")
    dims = reduced_dims(arguments.get("dim"), len(source.sizes))
    dtype = source.dtype if source.dtype.is_floating_point or source.dtype.is_complex else torch.float32
    largest = allocated(prod(n for d, n in enumerate(source.sizes) if d not in dims), dtype)
    exponentials = Layout(source.sizes, source.strides, dtype)
    summing = reduction_scratch(exponentials, dims, accumulated(dtype).itemsize, processor)
    return largest + exponentials.bytes + summing


@scratch_of("var", "std", "var_mean", "std_mean")
def _moments(arguments: Arguments, processor: Processor) -> int:
    """Mean, sum of squares and two counts are accumulated (``WelfordData`` in SharedReduceOps.h)."""
    source = arguments.layout("self")
    dims = reduced_dims(arguments.get("dim"), len(source.sizes))
    return reduction_scratch(source, dims, 4 * accumulated(source.dtype).itemsize, processor)


@scratch_of("argmax", "argmin", "max", "min")
def _extremes(arguments: Arguments, processor: Processor) -> int:
    """Where indices are wanted, each is accumulated with its value."""
    if arguments.get("other") is not None:
        return 0  # element by element
    source = arguments.layout("self")
    dim = arguments.get("dim")
    with_index = dim is not None or arguments.get("keepdim") is not None
    element_bytes = 16 if with_index else accumulated(source.dtype).itemsize
    return reduction_scratch(source, reduced_dims(dim, len(source.sizes)), element_bytes, processor)


@scratch_of("any", "all")
def _truths(arguments: Arguments, processor: Processor) -> int:
    source = arguments.layout("self")
    dims = reduced_dims(arguments.get("dim"), len(source.sizes))
    return reduction_scratch(source, dims, 1, processor)


def _dimensions(source: Layout, dims: Collection[int]) -> tuple[list[_Dim], list[_Dim]]:
    """Reduced dimensions and those that are kept, fastest first, with neighbours merged."""
    reduced, kept, output_stride = [], [], 1
    for d in range(len(source.sizes) - 1, -1, -1):
        size, stride = source.sizes[d], source.strides[d]
        if size == 1:
            continue
        if d in dims:
            reduced.append(_Dim(size, stride, 0))
        else:
            kept.append(_Dim(size, stride, output_stride))
            output_stride *= size
    reduced.sort(key=lambda dim: dim.stride)
    return _merged(reduced), _merged(kept)


def _merged(dims: Sequence[_Dim]) -> list[_Dim]:
    merged: list[_Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.size * last.stride == dim.stride
            and last.size * last.output_stride == dim.output_stride
        ):
            merged[-1] = _Dim(last.size * dim.size, last.stride, last.output_stride)
        else:
            merged.append(dim)
    return merged


def _vector(source: Layout, reduced: Sequence[_Dim], kept: Sequence[_Dim]) -> int:
    """How many outputs a thread reads at once."""
    numbers = [source.offset, kept[0].size, *(d.stride for d in (*reduced, *kept[1:]))]
    vector = 4
    while any(number % vector for number in numbers):
        vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads of a block in both directions."""
    width, height = (_power(n) if n < most else most for n in (width, height))
    block_width = min(width, _WARP)
    block_height = min(height, most // block_width)
    return min(width, most // block_height), block_height


def _power(count: int) -> int:
    """The largest power of 2 that is not more; 1 at least."""
    return 1 << max(count.bit_length() - 1, 0)
