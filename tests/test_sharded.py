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

_EXAMPLES = Path(__file__).parents[1] / "examples"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DistributedDataParallel": ("ddp", {}),
    "fully_shard, in half precision": ("fsdp2", {"half": True}),
}


def _rank(folder: Path) -> None:
    rank = dist.get_rank()
    (folder / f"other plans.{rank}").write_text(_other_plans())
    for name, (example, options) in CASES.items():
        train = runpy.run_path(str(_EXAMPLES / f"{example}.py"))["train"]
        with counting_runs() as runs:
            ours = train("75%", 2, **options)
        theirs = train(None, 2, **options)
        unequal = [n for n, value in theirs.items() if not torch.equal(ours[n], value)]
        # Of each step the embedding, three blocks and the head.
        (folder / f"{name}.{rank}").write_text(f"{runs.backward} backwards, {unequal or 'all'} equal")


def _other_plans() -> str:
    """What a rank says of a step before which the ranks apply a plan in two ways, and shard."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    plan = planner.plan(model, (x,), budget="min", solver="checkpoint_all")
    plan.apply(model, on_new_shape="replan" if dist.get_rank() else "reapply")
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
def test_ranks_with_other_plans_are_an_error(outcomes: Path) -> None:
    for rank in range(2):
        said = (outcomes / f"other plans.{rank}").read_text()
        assert said.startswith(f"rank {rank} trains by another plan than rank {1 - rank}")
