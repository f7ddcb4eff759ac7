"""Data-parallel training: every rank is to train by the same plan.

Ranks with different plans would still compute the same gradients, but the slowest sets the pace of all, and
the one that fits its memory least ends all. So it is an error, raised on every rank at the first forward
inside ``DistributedDataParallel``.
"""

import hashlib
import json
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from planner import _torch
from planner.errors import PlanMismatch
from planner.plan_file import Plan

logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=30)
"""How long a rank waits for what the others train by; after that it goes on without having compared."""


def decisions_digest(plan: Plan) -> str:
    """Digest of what a plan does: equal for plans that run the same, whenever and however they were found."""
    decisions = [[g.structure, g.unused_outputs, g.backward] for g in plan.graphs]
    return hashlib.sha256(json.dumps(decisions).encode()).hexdigest()


def refuse_wrappers(model: torch.nn.Module, doing: str) -> None:
    """A data-parallel wrapper has buckets and hooks of its own; what is planned is the module inside.

    Raises:
        PlanMismatch: If ``model`` is such a wrapper.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise PlanMismatch(
            f"this is a {type(model).__name__}: {doing} the module inside, as model.module or before it is "
            "wrapped; the wrapper then trains by the plan"
        )


class RankCheck:
    """Compares the plan of one module with those of the other ranks, once.

    No collective is used: each rank leaves its digest in the job's key-value store and reads those of the
    others, so that a rank that is alone in its forward is delayed once, and never hangs.
    """

    _number = 0  # first forwards happen in the same order on all ranks, which pairs them

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self) -> bool:
        """Compare, if this is a forward inside ``DistributedDataParallel``.

        Returns:
            Whether it was, and nothing is left to compare.

        Raises:
            PlanMismatch: If another rank trains by another plan.
        """
        group = _torch.active_data_parallel_group()
        if group is None:
            return False
        ranks, mine = dist.get_process_group_ranks(group), dist.get_rank()
        name = f"planner/{'-'.join(map(str, ranks))}/{RankCheck._number}"
        RankCheck._number += 1
        store, digest = _torch.default_store(), decisions_digest(self._plan)
        store.set(f"{name}/{mine}", digest)
        others = [rank for rank in ranks if rank != mine]
        try:
            store.wait([f"{name}/{rank}" for rank in others], PATIENCE)
        except dist.DistStoreError:
            logger.warning("another rank does not say which plan it trains by; plans are not compared")
            return True
        for rank in others:
            if store.get(f"{name}/{rank}").decode() != digest:
                raise PlanMismatch(
                    f"rank {mine} trains by another plan than rank {rank}: plan once, save the plan, and "
                    "apply the same file on all ranks"
                )
        return True
