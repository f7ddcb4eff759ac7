"""Training on several ranks: all ranks train by the same plan, and as the plan expects.

Ranks with different plans would compute the same gradients, but the slowest rank sets the pace of all, and
the first to run out of memory ends all. So different plans are an error, raised on every rank at the first
forward inside ``DistributedDataParallel``, or of a module that ``fully_shard`` shards.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from planner._torch import distributed
from planner._torch.distributed import is_fully_sharded
from planner.errors import PlanMismatch, warn
from planner.graph.spec import GraphSpec
from planner.parallel.data_parallel import wrapped_here
from planner.parallel.sharded_as_planned import warn_of_other_sharding
from planner.parallel.strategies import DDP
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.training_step.inputs import SHARDED

if TYPE_CHECKING:
    from planner.runtime.shapes.policy import OnNewShape


logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=30)
"""How long a rank waits for the digests of the others; after that it trains on without having compared."""


_NOT_RUN: Any = {
    "fingerprint": True,
    "kept": True,
    "other_programs": {"__all__": {"kept"}},
    "ops": {"__all__": {"bytes", "seconds"}},
}
"""Fields of a graph's record that decide nothing that runs: sizes, costs, and fields for readers."""
_IN_SPEC: Any = dict.fromkeys(("unused_outputs", "per_use_inputs", "gradient_layouts", "split"), True)
"""Fields of it that :class:`GraphSpec` holds, whose own digest counts."""


def decisions_digest(plan: PlanRecord, on_new_shape: "OnNewShape" = "reapply") -> str:
    """Digest of a plan's decisions: equal for plans that run the same, whenever and however they were found.

    Args:
        plan: The plan.
        on_new_shape: As the plan is applied; the fields that it depends on count too.
    """
    decisions: dict[str, Any] = {
        "coverage": plan.coverage,
        "training": plan.model.training,
        "offload": plan.target.offload,
        # All fields but the named ones: a new field counts until somebody excludes it.
        "graphs": [graph.model_dump(mode="json", exclude=_NOT_RUN | _IN_SPEC) for graph in plan.graphs],
        "forward_only": plan.forward_only,
        "views": [views.model_dump(mode="json") for views in plan.views],
        "replay": None if plan.replay is None else plan.replay.model_dump(mode="json"),
        "specs": [GraphSpec.of(graph).digest for graph in plan.graphs],
        "on_new_shape": on_new_shape,
    }
    if on_new_shape != "reapply":
        decisions["inputs"] = [(tensor.path, tensor.shape) for tensor in plan.model.inputs]
    if on_new_shape == "replan":
        decisions["budget_bytes"] = plan.target.budget_bytes
    return hashlib.sha256(json.dumps(decisions).encode()).hexdigest()


def warn_of_other_ranks(plan: PlanRecord, model: torch.nn.Module) -> distributed.UnreducedGradients | None:
    """Warn where a module is about to train on other ranks than its plan is for.

    Returns:
        A watch for gradients that an earlier step did not reduce, where the plan counts none of these; else
        None.

    Raises:
        PlanMismatch: The module is not distributed as the plan's is.
    """
    planned = plan.target.parallel
    sharded, among = is_fully_sharded(model), distributed.tensor_parallel_ranks(model)
    planned_among = 1 if planned is None else planned.distributed_among
    if among != planned_among:
        raise PlanMismatch(
            f"the plan is of the model distributed among {planned_among} ranks by parallelize_module, and "
            f"this one is among {among} (1: whole): distribute it in the same way, then apply the plan, or "
            "plan it as it is"
        )
    group = distributed.active_data_parallel_group()
    if planned is None or planned.kind == "tensor":
        if sharded:
            warn(SHARDED)
        elif group is not None:
            _warn_of_buckets(plan, model, wrapped_here())
        return None
    if planned.kind == "fsdp2":
        world_size, kind = distributed.number_of_shards(model), "FSDP2"
        situation = (
            f"its parameters are sharded among {world_size}" if sharded else "its parameters are whole"
        )
    else:
        world_size, kind = 0 if group is None else len(dist.get_process_group_ranks(group)), "DDP"
        situation = (
            f"there are {world_size}" if group is not None else "it runs outside of DistributedDataParallel"
        )
        if sharded:
            situation = "its parameters are sharded by fully_shard"
    if world_size != planned.world_size or (sharded and planned.kind == "ddp"):
        warn(
            f"the plan is for {planned.world_size} ranks, parallel=planner.{kind}(world_size="
            f"{planned.world_size}), and {situation}: the step takes other memory than predicted. Plan for "
            "the ranks that train"
        )
    elif planned.kind == "fsdp2":
        reduces = warn_of_other_sharding(plan, planned, model)
        return distributed.UnreducedGradients(model) if reduces and not planned.no_sync else None
    return None


def _warn_of_buckets(plan: PlanRecord, model: torch.nn.Module, wrapped: DDP | None) -> None:
    bucket_bytes = sum(distributed.local_tensor(p).nbytes for p in model.parameters() if p.requires_grad)
    if wrapped is None or not bucket_bytes:
        return
    target, options = plan.target, f"world_size={wrapped.world_size}"
    if wrapped.gradient_as_bucket_view:
        options += ", gradient_as_bucket_view=True"
    remedy = f"plan with parallel=planner.DDP({options})"
    if target.backend == "inductor" or target.in_flight is not None or target.parallel is not None:
        remedy = "leave as much room in the budget"  # none of these plans counts them
    warn(
        f"DistributedDataParallel has buckets of {format_bytes(bucket_bytes)}, as large as the gradients, "
        f"which the plan does not count: the whole step takes as much more than predicted; {remedy}"
    )


UNREDUCED = (
    "gradients were not reduced in the backward before, and fully_shard keeps whole ones: the step takes as "
    "much more than predicted. Plan with parallel=planner.FSDP2(..., no_sync=True) where those of several "
    "micro-batches are added up before they are reduced"
)


class Ranks:
    """The checks before each step of a planned module that trains on several ranks."""

    def __init__(self, plan: PlanRecord, on_new_shape: "OnNewShape" = "reapply") -> None:
        self._plan, self._on_new_shape = plan, on_new_shape
        self._compare: RankCheck | None = RankCheck(plan, on_new_shape)
        self._first = True
        self._unreduced: distributed.UnreducedGradients | None = None  # None where it is not watched for

    def check(self, model: torch.nn.Module) -> None:
        """Compare the plan with other ranks' and with how the module is distributed; warn once of each.

        Raises:
            PlanMismatch: Another rank trains by another plan, or the module is distributed otherwise.
        """
        if self._compare is not None and self._compare():
            self._compare = None
        if self._first:
            self._unreduced = warn_of_other_ranks(self._plan, model)
            if distributed.holds_dtensors(model):
                RankCheck(self._plan, self._on_new_shape).among_shards(model)
            self._first = False  # only now: a refusal is raised again at every call
        if self._unreduced is not None and self._unreduced.are_there():
            self._unreduced = None
            warn(UNREDUCED)


class RankCheck:
    """Compares the plan of one module with those of the other ranks, once.

    It uses no collective: each rank leaves its digest in the job's key-value store and reads those of the
    others. So a rank that is alone in its forward is delayed once, and never hangs.
    """

    # By group of ranks: its first forwards happen in the same order on all of its ranks, which pairs them.
    _numbers: ClassVar[Counter[str]] = Counter()

    def __init__(self, plan: PlanRecord, on_new_shape: "OnNewShape" = "reapply") -> None:
        self._plan, self._on_new_shape = plan, on_new_shape

    def __call__(self) -> bool:
        """Compare, if this is a forward inside ``DistributedDataParallel``.

        Returns:
            Whether it was, and nothing is left to compare.

        Raises:
            PlanMismatch: If another rank trains by another plan.
        """
        group = distributed.active_data_parallel_group()
        if group is None:
            return False
        self._compare(dist.get_process_group_ranks(group))
        return True

    def among_shards(self, model: torch.nn.Module) -> None:
        """Compare with the ranks among which the parameters of a module are sharded.

        Raises:
            PlanMismatch: If another of them trains by another plan.
        """
        ranks = distributed.ranks_of_shards(model)
        if len(ranks) > 1:
            self._compare(ranks)

    def _compare(self, ranks: Sequence[int]) -> None:
        mine = dist.get_rank()
        group = "-".join(map(str, ranks))
        name = f"planner/{group}/{self._numbers[group]}"
        self._numbers[group] += 1
        digest = decisions_digest(self._plan, self._on_new_shape)
        others = [rank for rank in ranks if rank != mine]
        try:
            store = distributed.default_store()
            store.set(f"{name}/{mine}", digest)
            store.wait([f"{name}/{rank}" for rank in others], PATIENCE)
            digests = {rank: store.get(f"{name}/{rank}").decode() for rank in others}
        except RuntimeError:  # only some stores raise the more precise DistError
            logger.warning("another rank does not say which plan it trains by; plans are not compared")
            return
        for rank in others:
            if digests[rank] != digest:
                raise PlanMismatch(
                    f"rank {mine} trains by another plan than rank {rank}, or with another on_new_shape=: "
                    "plan once, save the plan, and apply the same file in the same way on all ranks"
                )
