"""Four processes in two pairs: layers are distributed in a pair, and sharded between the pairs."""

import importlib
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import planner
from tests.gloo import let_gloo_end, measured, pauses
from tests.ranks import run_ranks, say_each, what_a_rank_says
from tests.side_by_side import counting_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

STEPS = 3
BFLOAT16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "along the sequence, in half precision": (True, False, BFLOAT16),
}
"""By name whether the sequence is distributed, too; `reshard_after_forward`; and dtypes."""


def _example() -> Any:
    return importlib.import_module("tensor_parallel")


def _plan(mesh: DeviceMesh, name: str) -> planner.Plan:
    """Rank 0 plans for all, which calls no other rank; all build what it plans."""
    sequence, reshard, dtypes = CASES[name]
    built, text = _example().build_model(mesh["tensor"], sequence=sequence), [""]
    if dist.get_rank() == 0:
        parallel = planner.FSDP2(2, reshard, **dtypes)
        text = [planner.plan(built, (_example().batch(0),), budget="min", parallel=parallel).dumps()]
    dist.broadcast_object_list(text)
    return planner.Plan.loads(text[0])


def _trained(mesh: DeviceMesh, name: str) -> str:
    plan, words = _plan(mesh, name), _example().batch(mesh.get_local_rank("data"))
    sequence, reshard, dtypes = CASES[name]
    options: dict[str, Any] = {"mesh": mesh["data"], "reshard_after_forward": reshard}
    if dtypes:
        options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    weights, off = [], []
    for footprint in (plan.predicted, plan.baseline):
        model = _example().build_model(mesh["tensor"], sequence=sequence)
        if footprint is plan.predicted:
            plan.apply(model)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        with counting_runs() as runs:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(STEPS):
                optimizer.zero_grad()
                model(_example().batch(2 * step + mesh.get_local_rank("data"))).backward()
                optimizer.step()
        if footprint is plan.predicted and runs.backward != STEPS * (len(model.layers) + 2):
            return f"the plan was not followed: {runs.backward} backwards"
        model.zero_grad()
        weights.append({n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)})
        with pauses():
            off.append(measured(model, words, footprint.dynamic_peak_bytes) - footprint.dynamic_peak_bytes)
    unequal = [name for name, value in weights[1].items() if not torch.equal(weights[0][name], value)]
    return f"{off} bytes off, {unequal or 'all'} equal"


def _rank(folder: Path) -> None:
    library = let_gloo_end()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        say_each(CASES, partial(_trained, mesh), folder)
    del library


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each case; all in one group of processes."""
    return run_ranks(_rank, tmp_path_factory, "pairs of pairs", 4)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_measure_what_was_predicted_and_get_what_they_get_without(
    name: str, outcomes: Path
) -> None:
    for rank in range(4):
        assert what_a_rank_says(outcomes, name, rank) == "[0, 0] bytes off, all equal"
