"""The partitioner of torch.compile, which recomputes within a ratio of saved bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.config as functorch_config

BACKEND = "aot_eager_decomp_partition"
"""Partitions as the default compiler does, and runs the halves without making kernels."""


@contextlib.contextmanager
def within_ratio(module: torch.nn.Module, ratio: float) -> Iterator[Any]:
    """The module compiled with ``activation_memory_budget``, which counts at the first call.

    Args:
        module: The module, which is not changed.
        ratio: The share that may be saved of the bytes that would be saved for the backward: 1 recomputes
            nothing costly.
    """
    torch._dynamo.reset()
    try:
        with functorch_config.patch(activation_memory_budget=ratio):
            yield torch.compile(module, backend=BACKEND)
    finally:
        torch._dynamo.reset()
