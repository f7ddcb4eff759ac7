"""A warning where ``fully_shard`` shards a module otherwise than planned.

Gradients are right in any case; the step takes other memory than predicted.
"""

from collections.abc import Iterator

import torch

from planner._torch.distributed import (
    ShardedUnit,
    is_fully_sharded,
    names_of_units,
    names_of_whole,
    sharded_units,
)
from planner.errors import warn
from planner.parallel.recorded import parallel_of
from planner.parallel.strategies import FSDP2
from planner.parallel.unreduced import reduced_in
from planner.planfile.plan import PlanRecord
from planner.planfile.schema import ParallelRecord

_SHOWN = 3
"""Differences that are named."""


def warn_of_other_sharding(plan: PlanRecord, planned: ParallelRecord, model: torch.nn.Module) -> bool:
    """Warn where the units or the options of ``fully_shard`` are not the planned ones.

    Args:
        plan: A plan for FSDP2.
        planned: Its ``target.parallel``.
        model: The module, sharded.

    Returns:
        Whether gradients are reduced after this step's backward.
    """
    units = sharded_units(model)
    options = dict.fromkeys(_other_options(planned, units))
    found = [
        *_other_units(plan.model.regions, model),
        *_other_groups(planned, units),
        *_whole(model),
        *options,
    ]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        warn(
            f"fully_shard was not used as planned: {'; '.join(found[:_SHOWN])}{more}. The step takes other "
            "memory than predicted: shard it as planned, or plan with the regions= and the "
            "parallel=planner.FSDP2(...) that it is trained with"
        )
    return all(unit.reduces for unit in units)


def has_other_units(plan: PlanRecord, model: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` shards other parts of a module than planned, so that others are gathered."""
    if not is_fully_sharded(model):
        return False
    planned = plan.target.parallel
    return planned is None or planned.kind != "fsdp2" or any(_other_units(plan.model.regions, model))


def _other_units(regions: list[str], model: torch.nn.Module) -> Iterator[str]:
    actual, planned = dict.fromkeys(names_of_units(model)), set(regions)
    for name in regions:
        if name not in actual and next(model.get_submodule(name).parameters(), None) is not None:
            yield f"{name} was planned as a unit, and is none"
    for name in actual:
        if name not in planned:
            yield f"{name} is a unit of its own, and was not planned as one"


def _whole(model: torch.nn.Module) -> Iterator[str]:
    if names := names_of_whole(model):
        more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        yield f"{names[0]}{more} not sharded, as with ignored_params, which no plan counts"


def _other_groups(planned: ParallelRecord, units: list[ShardedUnit]) -> Iterator[str]:
    wanted = {frozenset(name.split("+")) for name in planned.kept_gathered if "+" in name}
    actual = {frozenset(unit.names) for unit in units if len(unit.names) > 1}
    for names in sorted(map(sorted, wanted - actual)):
        yield f"{' and '.join(names)} were planned as one unit, and are not"
    for names in sorted(map(sorted, actual - wanted)):
        yield f"{' and '.join(names)} are one unit, and were not planned as one"


def _other_options(planned: ParallelRecord, units: list[ShardedUnit]) -> Iterator[str]:
    options = parallel_of(planned)
    assert isinstance(options, FSDP2)
    kept = {part for name in options.kept_gathered for part in name.split("+")}
    for unit in units:
        reshard = False if kept & set(unit.names) else options.reshard_after_forward
        if reshard is None and not unit.of_root:
            reshard = True
        computed, reduced = _dtypes(unit, options.param_dtype, options.reduce_dtype)
        own = _dtypes(unit, unit.param_dtype, unit.reduce_dtype)
        for name, wanted, there in (
            ("reshard_after_forward", reshard, unit.reshard_after_forward),
            ("param_dtype", computed, own[0]),
            ("reduce_dtype", reduced, own[1]),
            ("replicas", options.replicas, unit.replicas),
        ):
            if wanted != there:
                who = "the root has" if unit.of_root else "units have"
                yield f"{name} was planned as {wanted}, and {who} {there}"
        if not unit.reduces and not options.no_sync:
            yield "gradients are not reduced, and whole ones are kept: that is no_sync=True"
        if unit.reduces and options.no_sync:
            yield "no_sync=True was planned, and gradients are reduced after the first backward"
        if unit.reduces and not unit.reduces_all:
            yield "gradients are not reduced among all replicas, and kept, which no plan counts"
        if not unit.reshards:
            yield "parameters are not freed after the backward, which no plan counts"
        if unit.offloads:
            yield "CPUOffloadPolicy keeps parameters on the CPU, which no plan counts"
        if unit.output_dtype not in (None, computed):
            yield f"output_dtype={unit.output_dtype} casts what is returned, which no plan counts"
        if unit.overrides:
            yield "param_dtype_override_fn computes some parameters in other types, which no plan counts"
        if unit.prefetches:
            yield "set_modules_to_backward_prefetch says what is gathered when, which no plan counts"


def _dtypes(
    unit: ShardedUnit, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The types that a unit computes and reduces in by a policy; None: those of the parameters."""
    own = next(iter(unit.dtypes)) if len(unit.dtypes) == 1 else None
    computed = param_dtype or own
    reduced = reduce_dtype or computed if own is None else reduced_in(own, param_dtype, reduce_dtype)
    return computed, reduced
