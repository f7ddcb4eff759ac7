"""Layer, RMS and group normalization: contiguous copies, and sums that a second kernel reads.

From PyTorch's ``aten/src/ATen/native/cuda/layer_norm_kernel.cu`` and ``group_norm_kernel.cu``. On an H200
they agreed to the byte, but for the partial sums of more than 65,536 rows, which no row of the measurement
had.
"""

from math import prod

import torch

from planner._torch.fake import concrete_size
from planner.costs.cuda_scratch.layouts import Layout, accumulated, allocated, ceil_div, copies
from planner.costs.cuda_scratch.processors import Processor
from planner.costs.cuda_scratch.reductions import reduction_scratch
from planner.costs.cuda_scratch.registry import Arguments, scratch_of

_MANY_ROWS = 64 * 1024
_ROWS_OF_A_BLOCK = 32
_COLUMNS_OF_A_BLOCK = 32
_MOST_BLOCKS = 32 * 1024


@scratch_of("native_layer_norm", "_fused_rms_norm")
def _layer_norm(arguments: Arguments, _processor: Processor) -> int:
    return copies(arguments.layout("input"), arguments.maybe("weight"), arguments.maybe("bias"))


@scratch_of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(arguments: Arguments, processor: Processor) -> int:
    grad, source = arguments.layout("grad_out"), arguments.layout("input")
    weight = arguments.maybe("weight")
    columns = prod(concrete_size(n) for n in arguments["normalized_shape"])
    scratch = copies(grad, source, weight, arguments.maybe("bias"))
    if not columns or not source.elements or weight is None:
        return scratch
    wanted = [bool(flag) for flag in list(arguments["output_mask"])[1:]]
    rows = source.elements // columns
    return scratch + _partial_sums(rows, columns, weight.dtype, sum(wanted), processor)


def _partial_sums(rows: int, columns: int, dtype: torch.dtype, gradients: int, processor: Processor) -> int:
    """What the gradients of weight and bias take where many rows are split among thread blocks."""
    few = columns // _COLUMNS_OF_A_BLOCK < processor.multiprocessors // 2
    if not gradients or rows <= _MANY_ROWS or not few:
        return 0
    across = ceil_div(columns, _COLUMNS_OF_A_BLOCK)
    blocks = min(_MOST_BLOCKS // across, ceil_div(rows, _ROWS_OF_A_BLOCK))
    partial = Layout((blocks, columns), (columns, 1), dtype)
    again = reduction_scratch(partial, [0], accumulated(dtype).itemsize, processor)
    return gradients * partial.bytes + allocated(columns, dtype) + again


@scratch_of("native_group_norm")
def _group_norm(arguments: Arguments, _processor: Processor) -> int:
    """A factor and a term of every channel of every example."""
    source = arguments.layout("input")
    affine = arguments.maybe("weight") is not None or arguments.maybe("bias") is not None
    if concrete_size(arguments["HxW"]) == 1 or not affine:
        return 0
    return 2 * _of_channels(arguments, source)


@scratch_of("native_group_norm_backward")
def _group_norm_backward(arguments: Arguments, _processor: Processor) -> int:
    """Two sums of every channel, a factor of it, and two terms of every group."""
    source = arguments.layout("input")
    groups = concrete_size(arguments["N"]) * concrete_size(arguments["group"])
    of_groups = 2 * allocated(groups, accumulated(source.dtype)) if arguments["output_mask"][0] else 0
    if concrete_size(arguments["HxW"]) == 1:
        return of_groups
    factors = bool(of_groups) and arguments.maybe("weight") is not None
    return (3 if factors else 2) * _of_channels(arguments, source) + of_groups


def _of_channels(arguments: Arguments, source: Layout) -> int:
    channels = concrete_size(arguments["N"]) * concrete_size(arguments["C"])
    return allocated(channels, accumulated(source.dtype))
