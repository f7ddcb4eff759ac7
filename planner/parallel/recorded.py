"""``parallel=`` as a plan file holds it."""

import torch

from planner.parallel.strategies import DDP, FSDP2
from planner.planfile.schema import ParallelRecord


def parallel_record(options: FSDP2 | DDP | None, tensor_ranks: int) -> ParallelRecord | None:
    """How ranks train, as plain data; None of a single process.

    Args:
        options: The value of `parallel=`.
        tensor_ranks: Among how many ranks `parallelize_module` distributed the model; 1: it is whole.
    """
    if options is None:
        return ParallelRecord(kind="tensor", world_size=tensor_ranks) if tensor_ranks > 1 else None
    if isinstance(options, DDP):
        return ParallelRecord(
            kind="ddp",
            world_size=options.world_size,
            bucket_cap_mb=float(options.bucket_cap_mb),
            gradient_as_bucket_view=options.gradient_as_bucket_view,
        )
    return ParallelRecord(
        kind="fsdp2",
        world_size=options.world_size,
        reshard_after_forward=options.reshard_after_forward,
        param_dtype=_name(options.param_dtype),
        reduce_dtype=_name(options.reduce_dtype),
        no_sync=options.no_sync,
        replicas=options.replicas,
        kept_gathered=list(options.kept_gathered),
        tensor_ranks=tensor_ranks,
    )


def parallel_of(record: ParallelRecord | None) -> FSDP2 | DDP | None:
    """The options that a record holds; None where there are none, as the model itself is distributed."""
    if record is None or record.kind == "tensor":
        return None
    if record.kind == "ddp":
        cap = 25.0 if record.bucket_cap_mb is None else record.bucket_cap_mb
        return DDP(record.world_size, cap, bool(record.gradient_as_bucket_view))
    return FSDP2(
        record.world_size,
        record.reshard_after_forward,
        _dtype(record.param_dtype),
        _dtype(record.reduce_dtype),
        bool(record.no_sync),
        record.replicas,
        tuple(record.kept_gathered),
    )


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None
