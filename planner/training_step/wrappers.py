"""Wrappers around a module that are planned inside, not outside."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from planner._torch.tracing.inside_compile import is_compiled
from planner.errors import PlanMismatch
from planner.module_parts import buffers_of, parameters_of, parts_of


def without_shape(model: torch.nn.Module) -> str | None:
    """The first parameter or buffer that has no shape yet, as of ``nn.LazyLinear``; None where all have."""
    if not any(map(is_lazy, (*parameters_of(model), *buffers_of(model)))):
        return None
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if is_lazy(tensor)), None)


def refuse_without_shape(model: torch.nn.Module, doing: str) -> None:
    """Refuse a module with parameters that have no shape yet.

    Raises:
        PlanMismatch: It has some.
    """
    lazy = without_shape(model)
    if lazy is not None:
        raise PlanMismatch(
            f"{lazy} has no shape yet, as in nn.LazyLinear before its first call: {doing} the module "
            "after one forward, model(*args)"
        )


def refuse_wrappers(model: torch.nn.Module, doing: str) -> None:
    """Refuse a data-parallel wrapper, which has buckets and hooks of its own, and a compiled module: what is
    planned is the module inside.

    Raises:
        PlanMismatch: If ``model`` is one of these.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise PlanMismatch(
            f"this is a {type(model).__name__}: {doing} the module inside, as model.module or before it is "
            "wrapped; the wrapper then trains by the plan"
        )
    if isinstance(model, FullyShardedDataParallel):
        raise PlanMismatch(
            f"this is a FullyShardedDataParallel: {doing} the module inside before it is wrapped, and wrap "
            "it with use_orig_params=True"
        )
    if isinstance(model, FSDPModule):
        refuse_sharded(model, doing)
    if is_compiled(model):
        raise PlanMismatch(
            f"this is a torch.compile()d module: {doing} the module inside, model._orig_mod, or before it is "
            "compiled; while it trains it runs by the plan then, and what is around it compiled"
        )


def refuse_sharded(model: torch.nn.Module, doing: str) -> None:
    """Refuse a module that ``fully_shard`` shards, or parts of it.

    Raises:
        PlanMismatch: It does.
    """
    sharded = next((part for part in parts_of(model) if isinstance(part, FSDPModule)), None)
    if sharded is None:
        return
    what = "this module" if sharded is model else f"a part of this module, a {type(sharded).__name__},"
    raise PlanMismatch(
        f"{what} is sharded by fully_shard: {doing} it before it is sharded. Where Accelerate or a trainer "
        "shards it, call planner.auto_checkpoint(model, args, budget=..., parallel=planner.FSDP2(...)) with "
        "example inputs before it is given to them: a trainer's callback, or auto_checkpoint without inputs, "
        "plans when it is sharded already"
    )
