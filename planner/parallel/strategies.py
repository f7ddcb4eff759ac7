"""The values of ``parallel=``: how a model is trained on many ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from planner.errors import PlannerError
from planner.planfile.schema import MOST_MEASURED, MOST_RANKS


class ParallelError(PlannerError, ValueError):
    """A value of ``parallel=`` cannot be read, or contradicts itself or the model."""


@dataclass(frozen=True)
class FSDP2:
    """Parameters, gradients and optimizer state sharded among ranks by ``fully_shard``, each region by itself
    and the rest with the root. The prediction and the budget are one rank's, the one with the largest shards.

    Attributes:
        world_size: How many ranks there are; they need not be here.
        reshard_after_forward: The argument of ``fully_shard``, for the regions and for the root: whether
            parameters are freed after the forward. None: its default, which keeps the root's. A number: they
            are sharded among a smaller group of so many ranks until the backward.
        param_dtype: As in ``MixedPrecisionPolicy``: the type that parameters are gathered and computed in.
        reduce_dtype: As in ``MixedPrecisionPolicy``: the type that gradients are reduced in. None means
            ``param_dtype`` up to PyTorch 2.14, and the type of the parameters from 2.15 on.
        no_sync: Whether the gradients of several micro-batches are added up before they are reduced, by
            ``set_requires_gradient_sync(False)`` for all but the last, as Accelerate's ``no_sync`` and
            ``accumulate`` do it. Whole gradients are there between micro-batches. The prediction is the
            most that any micro-batch takes.
        replicas: For HSDP: the number of groups of ``world_size`` ranks. Each group shards the model alike.
        kept_gathered: Names of regions whose ``fully_shard`` gets ``reshard_after_forward=False``, whatever
            the others get. Accelerate does so with the last norm and the head, which it passes to
            ``fully_shard`` together: ``"model.norm+lm_head"`` names such a group, whose members are regions.

    Raises:
        ParallelError: A value is of another kind, or out of its range.
    """

    world_size: int
    reshard_after_forward: bool | int | None = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    no_sync: bool = False
    replicas: int = 1
    kept_gathered: Sequence[str] = ()

    kind: ClassVar[str] = "fsdp2"

    def __post_init__(self) -> None:
        _check_count("world_size", self.world_size, "ranks")
        reshard = self.reshard_after_forward
        if not (reshard is None or isinstance(reshard, bool)):
            divides = isinstance(reshard, int) and 1 < reshard < self.world_size
            if not divides or self.world_size % reshard:
                raise ParallelError(
                    f"reshard_after_forward={reshard!r}: expected True, False, None, or a number of ranks "
                    f"that divides world_size={self.world_size}, and is neither 1 nor all of them"
                )
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ParallelError(f"{name}={dtype!r}: expected a floating-point dtype, as torch.bfloat16")
        if not isinstance(self.no_sync, bool):
            raise ParallelError(f"no_sync={self.no_sync!r}: expected True or False")
        _check_count("replicas", self.replicas, "groups of ranks")
        kept: Any = self.kept_gathered
        listed = isinstance(kept, tuple | list)
        if not listed or not all(isinstance(x, str) and all(x.split("+")) for x in kept):
            raise ParallelError(
                f"kept_gathered={kept!r}: expected names of regions, as in "
                'kept_gathered=["model.embed_tokens", "model.norm+lm_head"]'
            )
        object.__setattr__(self, "kept_gathered", tuple(kept))

    def units(self, regions: Sequence[str]) -> list[tuple[str, ...]]:
        """Regions that are gathered together; most are by themselves.

        Raises:
            ParallelError: One of ``kept_gathered`` is no region.
        """
        groups = [tuple(name.split("+")) for name in self.kept_gathered]
        together = [name for group in groups for name in group]
        if missing := [name for name in together if name not in regions]:
            shown = [*regions[:_SHOWN], *(["..."] if len(regions) > _SHOWN else [])]
            raise ParallelError(
                f"kept_gathered names {missing[0]!r}, which is no region: name it in regions= as well; the "
                f"regions are {', '.join(shown) or 'none'}"
            )
        return [*((name,) for name in regions if name not in together), *groups]

    def reshards(self, unit: Sequence[str]) -> bool | int | None:
        """The ``reshard_after_forward`` of ``fully_shard`` for a unit."""
        return False if "+".join(unit) in self.kept_gathered else self.reshard_after_forward


@dataclass(frozen=True)
class DDP:
    """Every rank has the whole model, in ``DistributedDataParallel``, whose buckets are as large as the
    gradients. The prediction and the budget are one rank's.

    Attributes:
        world_size: How many ranks there are; they need not be here.
        bucket_cap_mb: The argument of ``DistributedDataParallel``. It does not change the size of all buckets
            together.
        gradient_as_bucket_view: The argument of ``DistributedDataParallel``: gradients lie in the buckets.

    Raises:
        ParallelError: A value is of another kind, or out of its range.
    """

    world_size: int
    bucket_cap_mb: float = 25
    gradient_as_bucket_view: bool = False

    kind: ClassVar[str] = "ddp"

    def __post_init__(self) -> None:
        _check_count("world_size", self.world_size, "ranks")
        cap = self.bucket_cap_mb
        if not isinstance(cap, int | float) or isinstance(cap, bool) or not 0 < cap <= MOST_MEASURED:
            raise ParallelError(
                f"bucket_cap_mb={cap!r}: expected a number of megabytes, more than 0, not infinity"
            )
        if not isinstance(self.gradient_as_bucket_view, bool):
            raise ParallelError(
                f"gradient_as_bucket_view={self.gradient_as_bucket_view!r}: expected True or False"
            )


Parallel = FSDP2 | DDP | str | None
"""An instance of either, or its text, as ``"fsdp2:8"``; None for a single process."""


def read_parallel(value: Parallel) -> FSDP2 | DDP | None:
    """Read the value of ``parallel=``.

    Args:
        value: An instance; or text: "fsdp2:8", "ddp:8", with further arguments by name behind commas, as in
            "fsdp2:8,param_dtype=bfloat16,reshard_after_forward=false". `kept_gathered` is given once for each
            of its names.

    Raises:
        ParallelError: It cannot be read.
    """
    if value is None or isinstance(value, FSDP2 | DDP):
        return value
    if not isinstance(value, str):
        raise ParallelError(f"parallel={value!r}: expected {_EXPECTED}")
    head, *others = value.split(",")
    kind, _, size = head.strip().lower().partition(":")
    if kind not in _KINDS or not size.isdecimal() or len(size) > len(str(MOST_RANKS)):
        raise ParallelError(f"parallel={value!r}: expected {_EXPECTED}")
    arguments: dict[str, Any] = {"world_size": int(size)}
    for other in others:
        name, _, text = other.strip().partition("=")
        known = [field.name for field in fields(_KINDS[kind]) if field.name != "world_size"]
        if name not in known or not text:
            raise ParallelError(f"parallel={value!r}: {name!r} is not one of {', '.join(known)}")
        if name == "kept_gathered":
            arguments[name] = (*arguments.get(name, ()), text.strip())
        elif name in arguments:
            raise ParallelError(f"parallel={value!r}: {name!r} is there twice: give it once")
        else:
            arguments[name] = _read(text)
    return _KINDS[kind](**arguments)


def refuse_for_tensor_parallel(parallel: FSDP2 | DDP | None, backend: str) -> None:
    """Refuse options that a model cannot have which ``parallelize_module`` distributed.

    Raises:
        ParallelError: There is one.
    """
    if isinstance(parallel, DDP):
        raise ParallelError(
            f"parallel={parallel.kind!r} of a model that is distributed already, by parallelize_module: plan "
            "it without parallel=, as its parameters say how it is distributed, or with planner.FSDP2(...) "
            "if fully_shard is to shard what each rank has of it"
        )
    if isinstance(parallel, FSDP2) and parallel.reshard_after_forward not in (True, False, None):
        raise ParallelError(
            f"reshard_after_forward={parallel.reshard_after_forward} of a model that parallelize_module "
            "distributed: fully_shard takes True, False or None for DTensors"
        )
    if backend != "eager":
        raise ParallelError(
            f"backend={backend!r} of a model that parallelize_module distributed: plan it with "
            "backend='eager'"
        )


_KINDS: dict[str, type[FSDP2] | type[DDP]] = {"fsdp2": FSDP2, "ddp": DDP}
_EXPECTED = (
    'planner.FSDP2(world_size=8), planner.DDP(world_size=8), or as text "fsdp2:8" or "ddp:8", with further '
    'arguments behind commas, as in "fsdp2:8,param_dtype=bfloat16"'
)
_SHOWN = 8
"""Regions that are named."""
_WORDS = {"true": True, "false": False, "none": None, "bf16": torch.bfloat16, "fp32": torch.float32}


def _read(text: str) -> Any:
    lowered = text.strip().lower()
    if lowered in _WORDS:
        return _WORDS[lowered]
    dtype = getattr(torch, lowered.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _check_count(name: str, count: object, of: str) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_RANKS:
        raise ParallelError(f"{name}={count!r:.40}: expected a number of {of}, 1 to {MOST_RANKS:,}")
