"""Modules that cannot be planned as they are: wrappers, sharded ones, and those without shapes yet."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from planner._torch.tracing.inside_compile import is_compiled
from planner.errors import PlanMismatch
from planner.module_parts import buffers_of, parameters_of, parts_of

SHARDED = (
    "parameters are DTensors that fully_shard made: the memory to gather and reduce them is not predicted, "
    "and the step may take more than predicted. Plan the model before it is sharded, with "
    'parallel="fsdp2:8" for 8 ranks'
)


def without_shape(model: torch.nn.Module) -> str | None:
    """The first parameter or buffer without a shape yet, as of ``nn.LazyLinear``; None where all have one."""
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
    """Refuse a data-parallel wrapper and a compiled module: the module inside is to be planned.

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
            "compiled; in training it then runs by the plan, and the code around it runs compiled"
        )


def refuse_sharded(model: torch.nn.Module, doing: str) -> None:
    """Refuse a module that ``fully_shard`` sharded, whole or in part.

    Raises:
        PlanMismatch: It is sharded.
    """
    sharded = next((part for part in parts_of(model) if isinstance(part, FSDPModule)), None)
    if sharded is None:
        return
    subject = "this module" if sharded is model else f"a part of this module, a {type(sharded).__name__},"
    raise PlanMismatch(
        f"{subject} is sharded by fully_shard: {doing} it before it is sharded. Where Accelerate or a "
        "trainer shards it, call planner.auto_checkpoint(model, args, budget=..., "
        "parallel=planner.FSDP2(...)) with example inputs before you give the model to them: a trainer's "
        "callback, or auto_checkpoint without inputs, plans when the model is sharded already"
    )
