"""What one rank of many is predicted to take, without the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.capture.capture import record_eagerly
from planner.cli.options import StepOptions
from planner.costs.devices import find_device
from planner.costs.eager_timeline import EagerTimeline, eager_timeline
from planner.costs.optimizer_step import optimizer_step
from planner.errors import PlannerError, PlanWarning
from planner.parallel.fully_shard import shard_elements, shard_shape
from planner.parallel.rank import Rank
from planner.parallel.recorded import parallel_of
from planner.parallel.strategies import DDP, FSDP2, ParallelError, read_parallel
from planner.planning.options import options_of
from planner.training_step.step import Step
from planner.user_plan import Plan
from tests.side_by_side import Layers, layers


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("fsdp2:8", FSDP2(8)),
        ("FSDP2:8,reshard_after_forward=2, param_dtype=bf16", FSDP2(8, 2, torch.bfloat16)),
        (
            "fsdp2:8,reshard_after_forward=none,reduce_dtype=torch.float32",
            FSDP2(8, None, None, torch.float32),
        ),
        (
            "fsdp2:2,no_sync=true,replicas=4",
            FSDP2(2, no_sync=True, replicas=4),
        ),
        ("fsdp2:2,kept_gathered=norm+head", FSDP2(2, kept_gathered=("norm+head",))),
        ("fsdp2:2,kept_gathered=norm,kept_gathered=head", FSDP2(2, kept_gathered=("norm", "head"))),
        ("ddp:4,gradient_as_bucket_view=true,bucket_cap_mb=2.5", DDP(4, 2.5, True)),
    ],
)
def test_the_text_says_what_the_objects_do(text: str, read: object) -> None:
    assert read_parallel(text) == read


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fsdp:8", r"parallel='fsdp:8': expected planner.FSDP2\(world_size=8\)"),
        ("ddp", "parallel='ddp': expected"),
        ("ddp:2,param_dtype=bf16", "'param_dtype' is not one of bucket_cap_mb, gradient_as_bucket_view"),
        ("fsdp2:0", "world_size=0: expected a number of ranks"),
        ("ddp:99999999", "world_size=99999999: expected a number of ranks, 1 to 10,000,000"),
        ("ddp:" + "9" * 5000, "parallel=.*: expected planner.FSDP2"),
        ("fsdp2:8,replicas=99999999", "replicas=99999999: expected a number of groups of ranks"),
        ("ddp:8,bucket_cap_mb=1" + "0" * 400 + ".0", "bucket_cap_mb=inf: expected a number of megabytes"),
        ("fsdp2:8,reshard_after_forward=3", "a number of ranks that divides world_size=8"),
        ("fsdp2:8,param_dtype=int8", "param_dtype=torch.int8: expected a floating-point dtype"),
        ("fsdp2:8,no_sync=true,no_sync=false", "'no_sync' is there twice: give it once"),
        ("fsdp2:8,no_sync=2", "no_sync=2: expected True or False"),
        ("fsdp2:8,replicas=0", "replicas=0: expected a number of groups"),
        ("fsdp2:8,kept_gathered=,", "'kept_gathered' is not one of"),
        ("fsdp2:8,kept_gathered=norm+", r"kept_gathered=\('norm\+',\): expected names of regions"),
        ("ddp:8,bucket_cap_mb=0", "bucket_cap_mb=0: expected a number of megabytes"),
        ("ddp:8,gradient_as_bucket_view=3", "gradient_as_bucket_view=3: expected True or False"),
        ("fsdp2:8,kind=ddp", "'kind' is not one of reshard_after_forward, .*, kept_gathered$"),
        ("ddp:8,world_size=4", "'world_size' is not one of bucket_cap_mb, gradient_as_bucket_view$"),
        (8, "parallel=8: expected"),
    ],
)
def test_what_cannot_be_is_said_at_once(value: Any, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        planner.plan(nn.Linear(1, 1), (torch.ones(1),), budget="min", parallel=value)


def test_every_rank_holds_as_much_as_the_first() -> None:
    assert shard_shape(torch.empty(10, 3), 4) == (3, 3)
    assert shard_elements(torch.empty(2, 5), 8) == 5  # ranks without a row have one of padding
    with pytest.raises(ParallelError, match="a parameter is a scalar"):
        shard_shape(torch.empty(()), 2)


def _plan(parallel: Any, **options: Any) -> Plan:
    model, args, _ = layers(lambda: Layers(2))
    return planner.plan(
        model, args, budget="min", solver="sqrt_n", encodings="none", parallel=parallel, **options
    )


def test_what_a_rank_holds() -> None:
    model = Layers(2)
    own = [*model.parameters()]
    sizes = [4 * p.numel() for p in own]
    there = [True] * len(sizes)
    eight, beside, inside = (Rank(options) for options in (FSDP2(8), DDP(8), DDP(8, 25, True)))
    assert eight.parameter_bytes(own) == eight.gradient_bytes(own, there) == [size // 8 for size in sizes]
    assert eight.bucket_bytes(own, there) == inside.bucket_bytes(own, there) == []
    assert beside.parameter_bytes(own) == beside.bucket_bytes(own, there) == sizes
    assert inside.bucket_bytes(own, [False] * len(sizes)) == sizes
    cpu = find_device("cpu")
    whole, shard = (optimizer_step("adamw", own, cpu, shape_of=f) for f in (None, eight.shape_of))
    counters = 4 * len(sizes)
    assert (shard.state_bytes - counters) * 8 == whole.state_bytes - counters


def _peak(options: FSDP2) -> EagerTimeline:
    model, args, _ = layers(lambda: Layers(8))
    rank = Rank(options, tuple(f"layers.{i}" for i in range(8)))
    recording = record_eagerly(model, Step(args), lambda copied: None, rank=rank)
    return eager_timeline(recording, find_device("cpu"), None)


def test_gathered_parameters_come_and_go_with_their_region() -> None:
    freed, kept, smaller = (_peak(FSDP2(4, reshard)) for reshard in (True, False, 2))
    assert freed.peak_bytes < smaller.peak_bytes < kept.peak_bytes
    # A quarter of the gradients is left, and the loss.
    gradients = sum(4 * p.numel() for p in Layers(8).parameters())
    assert freed.final_bytes == kept.final_bytes == gradients // 4 + 4
    half = _peak(FSDP2(4, True, torch.bfloat16, torch.float32))
    assert half.peak_bytes < 0.7 * freed.peak_bytes


def test_a_plan_file_says_for_whom_it_is() -> None:
    parallel = FSDP2(8, 2, torch.bfloat16, torch.float32, no_sync=True, replicas=2)
    loaded = Plan.loads(_plan(parallel).dumps())
    assert parallel_of(loaded.target.parallel) == parallel
    assert options_of(loaded).parallel == parallel
    assert loaded.model.regions == ["layers.0", "layers.1"]
    buckets = DDP(8, 10, True)
    assert parallel_of(Plan.loads(_plan(buckets).dumps()).target.parallel) == buckets


@pytest.mark.parametrize(
    ("parallel", "found"),
    [("fsdp2:8", "its parameters are whole"), ("ddp:8", "it runs outside of DistributedDataParallel")],
)
def test_a_step_on_other_ranks_than_planned_warns(parallel: str, found: str) -> None:
    model, args, _ = layers(lambda: Layers(2))
    _plan(parallel).apply(model)
    with pytest.warns(planner.PlanWarning, match=rf"the plan is for 8 ranks.*{found}"):
        model(*args).backward()


@pytest.mark.heavy
def test_regions_and_ranks_are_options_of_all_that_plan() -> None:
    model, args, _ = layers()
    options: Any = {"regions": "auto", "parallel": "fsdp2:4"}
    (swept,) = planner.sweep(model, args, budgets=["80%"], time_limit=5, **options)
    assert swept.model.regions == [f"layers.{i}" for i in range(4)]
    found = planner.max_batch(
        model,
        lambda batch: (torch.empty(batch, 32, device="meta"),),
        "1MB",
        time_limit=2,
        most=512,
        **options,
    )
    assert found.plan.model.regions
    assert found.plan.target.parallel is not None
    assert found.plan.whole_step is not None
    assert found.plan.whole_step.total_bytes <= 10**6
    estimated = planner.estimate(model, args, checkpoints=["layers.*"], **options)
    assert estimated.resident_bytes == swept.resident.total
    assert estimated.checkpointed is not None
    assert estimated.checkpointed.peak_bytes < estimated.whole_step.allocated_bytes


@pytest.mark.graphs
def test_the_whole_is_a_unit_where_no_parts_repeat() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = planner.plan(model, (torch.ones(4, 8),), budget="min", solver="sqrt_n", parallel="fsdp2:2")
    assert not plan.model.regions
    assert plan.resident.parameter_bytes == 4 * (4 * 9 + 9)


@pytest.mark.heavy
def test_a_plan_that_is_kept_in_a_file_is_taken_for_the_same_ranks(tmp_path: Path, capsys: Any) -> None:
    kept: Any = {"budget": "min", "solver": "sqrt_n", "cache": tmp_path / "plan.json", "optimizer": "adamw"}
    for parallel, said in (
        ("fsdp2:2", "planned"),
        ("fsdp2:2", "trains by"),
        ("fsdp2:4", "another step: parallel"),
    ):
        model, args, _ = layers(lambda: Layers(2))
        planner.auto_checkpoint(model, parallel=parallel, **kept)
        with pytest.warns(planner.PlanWarning, match=f"the plan is for {parallel[-1]} ranks"):
            model(*args).backward()
        assert said in capsys.readouterr().err


def test_the_command_line_says_it_alike() -> None:
    said = StepOptions(regions=["layers.*"], parallel="fsdp2:8").keywords()
    assert (said["regions"], said["parallel"]) == (["layers.*"], "fsdp2:8")
    assert StepOptions(regions=["auto"]).keywords()["regions"] == "auto"
    assert StepOptions().keywords()["regions"] is None


def test_verify_and_compare_know_that_a_budget_is_one_ranks() -> None:
    model, args, _ = layers(lambda: Layers(2))
    made = _plan("fsdp2:8")
    plan = made.model_copy(update={"target": made.target.model_copy(update={"budget_bytes": 1000})})
    with pytest.warns(PlanWarning, match="its parameters are whole"):
        report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_peak_bytes > 1000
    with pytest.raises(PlannerError, match="leave out device, accumulate and parallel"):
        planner.compare(model, args, budget="60%", measure=True, parallel="ddp:2")
