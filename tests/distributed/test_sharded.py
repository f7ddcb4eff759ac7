"""Two processes that train by a plan with regions, as the examples do it: the weights are those without."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import planner
from tests.ranks import run_ranks, what_a_rank_says
from tests.side_by_side import counting_runs

_EXAMPLES = Path(__file__).parents[2] / "examples"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DistributedDataParallel": ("ddp", {}),
    "fully_shard, in half precision": ("fsdp2", {"half": True}),
}

OTHER_PLANS: dict[str, tuple[list[str] | None, planner.FSDP2 | None]] = {
    "one plan, applied in two ways": (None, None),
    "plans with regions": (["0", "1"], planner.FSDP2(2)),
}


def _rank(folder: Path) -> None:
    rank = dist.get_rank()
    for name, given in OTHER_PLANS.items():
        (folder / f"{name}.{rank}").write_text(_other_plans(*given))
    for name, (example, options) in CASES.items():
        train = runpy.run_path(str(_EXAMPLES / f"{example}.py"))["train"]
        with counting_runs() as runs:
            ours = train("75%", 2, **options)
        theirs = train(None, 2, **options)
        unequal = [n for n, value in theirs.items() if not torch.equal(ours[n], value)]
        # Of each step the embedding, three blocks and the head.
        (folder / f"{name}.{rank}").write_text(f"{runs.backward} backwards, {unequal or 'all'} equal")


def _other_plans(regions: list[str] | None, parallel: planner.FSDP2 | None) -> str:
    """What a rank says of a step before which the ranks apply different plans, and shard.

    Those without regions are one plan, applied in two ways.
    """
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)))
    x = torch.ones(2, 4)
    second = dist.get_rank() == 1
    solver = "none" if second and regions else "checkpoint_all"
    plan = planner.plan(model, (x,), budget="500%", solver=solver, regions=regions, parallel=parallel)
    plan.apply(model, on_new_shape="replan" if second and not regions else "reapply")
    for name in regions or ():
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    try:
        model(x)
    except planner.PlanMismatch as error:
        return str(error)
    return "fine"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each case; all in one pair of processes."""
    return run_ranks(_rank, tmp_path_factory, "sharded")


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, outcomes: Path) -> None:
    for rank in range(2):
        assert what_a_rank_says(outcomes, name, rank) == "10 backwards, all equal"


@pytest.mark.heavy
@pytest.mark.parametrize("name", OTHER_PLANS)
def test_ranks_with_other_plans_are_an_error(name: str, outcomes: Path) -> None:
    for rank in range(2):
        said = what_a_rank_says(outcomes, name, rank)
        assert said.startswith(f"rank {rank} trains by another plan than rank {1 - rank}")
