"""Four processes that train by one plan: sums of more than two, replicas of shards, checkpoints of these."""

import importlib
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from tests.ranks import run_ranks, what_a_rank_says
from tests.side_by_side import counting_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

RANKS = 4
Weights = dict[str, torch.Tensor]
Loop = Callable[[planner.Plan | None, Path], Weights]


def _blocks() -> Any:
    return importlib.import_module("blocks")


def _train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer | None = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in steps:
        optimizer.zero_grad()
        model(_blocks().batch(step, dist.get_rank())).backward()
        optimizer.step()
    return optimizer


def _weights(model: nn.Module) -> Weights:
    state = model.state_dict()
    return {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state.items()}


def _built(plan: planner.Plan | None) -> nn.Module:
    model: nn.Module = _blocks().build_model()
    return model if plan is None else plan.apply(model)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _in_buckets(plan: planner.Plan | None, _folder: Path) -> Weights:
    model = _built(plan)
    _train(DistributedDataParallel(model), range(3))
    return _weights(model)


def _saved_and_loaded(plan: planner.Plan | None, folder: Path) -> Weights:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _shard(_built(plan), mesh)
    optimizer = _train(model, range(2))
    where = folder / ("planned" if plan else "unplanned")
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=where)
    model = _shard(_built(plan), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = get_state_dict(model, optimizer)
    loaded = {"model": states[0], "optimizer": states[1]}
    dcp.load(loaded, checkpoint_id=where)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    _train(model, range(2, 4), optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where)
    return _weights(model)


LOOPS: dict[str, tuple[Loop, planner.FSDP2 | planner.DDP]] = {
    "gradients in buckets": (_in_buckets, planner.DDP(RANKS)),
    "replicas of shards, saved and loaded": (_saved_and_loaded, planner.FSDP2(2, None, replicas=2)),
    "replayed, gradients in buckets": (_in_buckets, planner.DDP(RANKS)),
    "replayed, replicas of shards, saved and loaded": (
        _saved_and_loaded,
        planner.FSDP2(2, None, replicas=2),
    ),
}


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        yield


def _rank(folder: Path) -> None:
    for name, (loop, parallel) in LOOPS.items():
        try:
            text: list[Any] = [None]
            if dist.get_rank() == 0:
                regions = None if isinstance(parallel, planner.DDP) else "layers.*"
                inputs, built = (_blocks().batch(0, 0),), _blocks().build_model()
                plan = planner.plan(
                    built,
                    inputs,
                    budget="min",
                    solver="sqrt_n",
                    regions=regions,
                    parallel=parallel,
                    backend="replay" if name.startswith("replayed") else "graph",
                )
                text = [plan.dumps()]
            dist.broadcast_object_list(text)
            theirs = loop(None, folder)
            with counting_runs() as runs, _warnings_are_errors():
                ours = loop(planner.Plan.loads(text[0]), folder)
            unequal = [n for n, value in theirs.items() if not torch.equal(ours[n], value)]
            said = (
                f"{unequal or 'all'} equal"
                if max(runs.backward, runs.replayed) >= 3
                else "the plan was not followed"
            )
        except Exception:
            said = traceback.format_exc()
        (folder / f"{name}.{dist.get_rank()}").write_text(said)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each loop; all in one group of processes."""
    return run_ranks(_rank, tmp_path_factory, "four", RANKS)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LOOPS)
def test_four_ranks_get_what_they_get_without_a_plan(name: str, outcomes: Path) -> None:
    for rank in range(RANKS):
        assert what_a_rank_says(outcomes, name, rank) == "all equal"
