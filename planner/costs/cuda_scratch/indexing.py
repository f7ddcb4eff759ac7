"""Look-ups by index and their gradients, sorting, and running sums.

From PyTorch's ``aten/src/ATen/native``: ``cuda/Embedding.cu`` and ``cuda/EmbeddingBackwardKernel.cu`` (with
more than 3,072 indices they are sorted, and rows are summed in segments), ``cuda/Indexing.cu``
(``index_put_with_sort_kernel``), ``TensorAdvancedIndexing.cpp`` (copies of indices whose strides differ),
``cuda/Sort.cpp``, ``cuda/ScanKernels.cpp``; and CUB's ``dispatch_radix_sort.cuh`` (``InvokeOnesweep``). On an
H200 they agreed to the byte, up to 1,048,576 indices; CUB's sorts of other elements than pairs of 16 bytes,
and on other GPUs, were not seen: there its blocks may take other tiles.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch

from planner._torch.fake import concrete_size
from planner.costs.cuda_scratch.layouts import (
    HALF,
    Layout,
    allocated,
    ceil_div,
    copies,
    layout,
    rounded,
    summed,
)
from planner.costs.cuda_scratch.processors import Processor
from planner.costs.cuda_scratch.registry import Arguments, scratch_of

_UNSORTED_INDICES = 3072
_ROWS_OF_A_SEGMENT = 10
_WARP = 32
_SMALL_SORT = 4096
_SORTED_BY_ONE_BLOCK = 4096
_SORT_TILE_BYTES = 4608 * 16
_DIGIT_BITS = 8
_SCAN_TILE = 1024
_SCAN_PADDING = 32
_ALIGNMENT = 256


@scratch_of("embedding")
def _embedding(arguments: Arguments, _processor: Processor) -> int:
    """Indices that cannot be seen as one dimension are copied."""
    indices = arguments.layout("indices")
    return 0 if len(indices.sizes) == 1 or _flat(indices) else indices.bytes


@scratch_of("embedding_dense_backward")
def _embedding_backward(arguments: Arguments, _processor: Processor) -> int:
    grad, indices = arguments.layout("grad_output"), arguments.layout("indices")
    weights = concrete_size(arguments["num_weights"])
    count = indices.elements
    scratch = copies(grad, indices)
    by_frequency = bool(arguments["scale_grad_by_freq"])
    if not count or (count <= _UNSORTED_INDICES and not by_frequency):
        return scratch
    index = indices.dtype
    kept = (3 if by_frequency else 2) * allocated(count, index)  # sorted, where from, how often
    sorting = allocated(count, index) + _sort_buffers(count, 2 * index.itemsize, weights.bit_length())
    segments = min(count, weights)
    partial = count // _ROWS_OF_A_SEGMENT + segments
    columns = ceil_div(grad.elements // count, _WARP) * _WARP
    dtype = torch.float32 if grad.dtype in HALF else grad.dtype
    summing = allocated(count, index) + 2 * allocated(segments, index)
    summing += allocated(partial, index) + 2 * allocated(1, index)
    return scratch + kept + max(sorting, summing + allocated(partial * columns, dtype))


@scratch_of("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(arguments: Arguments, _processor: Processor) -> int:
    """Indices that are added at are sorted, and values made dense; others are written where they are."""
    given = list(arguments["indices"])
    indices = [layout(i) for i in given if isinstance(i, torch.Tensor)]
    if not arguments["accumulate"] or _masks(indices) or not indices:
        return 0
    shape = _broadcast([i.sizes for i in indices])
    count, sizes = prod(shape), arguments.layout("self").sizes
    if not count:
        return 0
    indexed = [isinstance(i, torch.Tensor) for i in given] + [False] * (len(sizes) - len(given))
    values = arguments.layout("values")
    added = count * prod(n for n, by_index in zip(sizes, indexed, strict=True) if not by_index)
    copied = values.copy_bytes if values.elements == added else allocated(added, values.dtype)
    rows = prod(sizes[: len(sizes) - indexed[::-1].index(True)])
    return copied + 4 * allocated(count, torch.int64) + _sort_buffers(count, 16, (rows - 1).bit_length())


@scratch_of("index", "_unsafe_index")
def _index(arguments: Arguments, _processor: Processor) -> int:
    """Several indices are made contiguous, at their common size, where their strides differ."""
    indices = [layout(i) for i in arguments["indices"] if isinstance(i, torch.Tensor)]
    if len(indices) < 2 or _masks(indices):
        return 0
    shape = _broadcast([i.sizes for i in indices])
    expanded = [_expanded(i, shape) for i in indices]
    if len({i.strides for i in expanded}) == 1:
        return 0
    return copies(*expanded)


@scratch_of("sort", "argsort")
def _sort(arguments: Arguments, _processor: Processor) -> int:
    """Few elements are numbered and sorted in place; more are numbered and sorted by CUB."""
    source = arguments.layout("self")
    if not source.sizes or not source.elements:
        return 0
    dim = concrete_size(arguments.get("dim", -1)) % len(source.sizes)
    length = source.sizes[dim]
    if length <= _SMALL_SORT:
        return allocated(length, torch.int64)
    last = dim == len(source.sizes) - 1 and source.contiguous
    copied = 0 if last else source.bytes
    numbered = allocated(source.elements, torch.int64)
    return (
        copied
        + numbered
        + _sort_buffers(source.elements, source.dtype.itemsize + 8, 8 * source.dtype.itemsize)
    )


@scratch_of("cumsum", "cumprod", "logcumsumexp")
def _scan(arguments: Arguments, _processor: Processor) -> int:
    """Inputs are cast and made contiguous; one dimension alone is scanned by CUB in tiles."""
    source = arguments.layout("self")
    made = summed(source, arguments.get("dtype"))
    scratch = 0
    if made is not source.dtype or not source.contiguous:
        scratch = allocated(source.elements, made)
    if source.elements and source.elements == max(source.sizes, default=1):
        status = ceil_div((ceil_div(source.elements, _SCAN_TILE) + _SCAN_PADDING) * 8, _ALIGNMENT)
        scratch += rounded(status * _ALIGNMENT + _ALIGNMENT - 1)
    return scratch


def _sort_buffers(count: int, element_bytes: int, bits: int) -> int:
    """What CUB's radix sort of pairs asks for: both again, counts of digits, and a state of each block.

    Args:
        count: How many pairs.
        element_bytes: Of a pair.
        bits: Of a key, as far as they differ.
    """
    if count <= _SORTED_BY_ONE_BLOCK:
        return rounded(1)
    digits = 1 << _DIGIT_BITS
    counts = digits * ceil_div(bits, _DIGIT_BITS) * 8
    states = digits * ceil_div(count * element_bytes, _SORT_TILE_BYTES) * 4
    parts = (count * element_bytes, counts, states, 1)
    return rounded(sum(ceil_div(part, _ALIGNMENT) * _ALIGNMENT for part in parts) + _ALIGNMENT - 1)


def _flat(source: Layout) -> bool:
    """Whether a view of one dimension sees all of it, in order."""
    dims = [(n, s) for n, s in zip(source.sizes, source.strides, strict=True) if n != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))


def _masks(indices: Sequence[Layout]) -> bool:
    """Whether one of them is a mask: data decide how many elements it selects."""
    return any(i.dtype in (torch.bool, torch.uint8) for i in indices)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _expanded(source: Layout, shape: tuple[int, ...]) -> Layout:
    missing = len(shape) - len(source.sizes)
    sizes, strides = (1,) * missing + source.sizes, (0,) * missing + source.strides
    strides = tuple(0 if a != b else s for a, b, s in zip(sizes, shape, strides, strict=True))
    return Layout(shape, strides, source.dtype)
