"""Shape functions of PyTorch that tell other shapes or layouts than the kernels make."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _meta_registrations
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format

from planner._torch.tracing.dynamo_patches import replace


@functools.cache
def widen_grouped_products() -> None:
    """Let the shape function of grouped matrix products take what their kernels take: not only bfloat16."""
    strict = _meta_registrations._meta_grouped_mm_common

    def shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale_a") is not None or mat_a.dtype is torch.bfloat16:
            return strict(mat_a, mat_b, *args, **kwargs)
        return _meta_registrations._create_grouped_mm_output_tensor(
            mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype")
        )

    replace(_meta_registrations, "_meta_grouped_mm_common", shape)


_NORMALISES = {
    getattr(torch.ops.aten, name).default: position
    for name, position in {
        "native_batch_norm": 0,
        "_native_batch_norm_legit": 0,
        "_native_batch_norm_legit_functional": 0,
        "_batch_norm_with_update": 0,
        "_batch_norm_with_update_functional": 0,
        "native_batch_norm_backward": 1,
        "batch_norm_backward": 1,
    }.items()
} | {torch.ops.aten._native_batch_norm_legit.no_stats: 0}
"""Batch normalisations, and which of their arguments is the input."""


@contextlib.contextmanager
def layouts_of_kernels() -> Iterator[None]:
    """Without data, batch normalisations on the CPU make results with the strides of their kernels'.

    The kernels' results are contiguous, or channels-last where the input is. PyTorch's shape functions keep
    the order of other inputs, transposed ones say, and then take copies of the result for views.
    """
    known = {
        operator: decomposition_table[operator]
        for operator in _NORMALISES.keys() & decomposition_table.keys()
    }
    decomposition_table.update({op: _laid_out(shapes, _NORMALISES[op]) for op, shapes in known.items()})
    try:
        yield
    finally:
        decomposition_table.update(known)


def _laid_out(shapes: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(shapes)  # only what says that it is of PyTorch is used
    def run(*args: Any, **kwargs: Any) -> Any:
        first, *others = shapes(*args, **kwargs)
        source = args[position]
        wanted = suggest_memory_format(source)
        if first is None or source.device.type != "cpu" or first.is_contiguous(memory_format=wanted):
            return first, *others
        return torch.empty_like(source, memory_format=wanted), *others

    return run
