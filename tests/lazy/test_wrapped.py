"""What ``DistributedDataParallel`` holds is planned where it is seen, or named; steps run inside of it."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers, layers, no_plan_warnings, plan_of

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.heavy]


def test_the_buckets_are_planned_at_the_first_call() -> None:
    model, (x,), _ = layers()
    gradients = sum(p.nbytes for p in model.parameters())
    alone = plan_of(model, (x,))
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=2, gradient_as_bucket_view=True)
    with no_plan_warnings():
        wrapped(x).backward()
    plan = installed_plan(model)
    assert plan is not None
    assert plan.target.parallel is not None
    found = plan.target.parallel
    assert (found.kind, found.world_size, found.bucket_cap_mb, found.gradient_as_bucket_view) == (
        "ddp",
        1,
        2,
        True,
    )
    assert plan.resident.total == alone.resident.total + gradients


def test_what_was_asked_for_goes_before_what_is_found() -> None:
    model, (x,), _ = layers()
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n", parallel=planner.DDP(8))
    with pytest.warns(planner.PlanWarning, match="the plan is for 8 ranks"):
        DistributedDataParallel(model)(x).backward()


@pytest.mark.parametrize("view", [False, True])
def test_buckets_that_a_plan_does_not_count_are_named_once(view: bool) -> None:
    model, (x,), _ = layers()
    plan_of(model, (x,)).apply(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            wrapped(x).backward()
            wrapped.zero_grad()
    said = [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)]
    assert len(said) == 1, said
    assert "DistributedDataParallel has buckets of 65.5 KiB" in said[0]
    advice = said[0].partition("plan with parallel=")[2]
    assert advice == f"planner.DDP(world_size=1{', gradient_as_bucket_view=True' if view else ''})"


@pytest.mark.usefixtures("interpreted")
def test_a_backend_that_counts_no_buckets_says_so_at_the_first_call() -> None:
    model, (x,), _ = layers(lambda: Layers(1))
    planner.auto_checkpoint(model, budget="500%", backend="inductor")
    with pytest.warns(planner.PlanWarning, match="has buckets of .*; leave as much room in the budget"):
        DistributedDataParallel(model)(x).backward()


def _loss(model: Any, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
    if fails:
        raise ValueError("a batch that cannot be used")
    found: torch.Tensor = model(x).square()
    return found


def test_a_step_runs_inside_of_the_wrappers_forward() -> None:
    model, (x,), _ = layers()
    wrapped = DistributedDataParallel(model)
    reduced: list[torch.Tensor] = []

    def reduce(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, reduce)
    step = planner.step(_loss, budget="min", solver="sqrt_n")
    with no_plan_warnings():
        step(wrapped, x).backward()
    assert step.plan is not None
    assert reduced
    wrapped.zero_grad()
    reduced.clear()
    with wrapped.no_sync():
        step(wrapped, x).backward()
    assert not reduced
    assert wrapped.module is model


def test_the_module_is_back_in_its_wrapper_when_a_step_has_failed() -> None:
    model, (x,), _ = layers(lambda: Layers(1))
    wrapped = DistributedDataParallel(model)
    step = planner.step(_loss, budget="min", solver="sqrt_n")
    with torch.no_grad(), pytest.raises(ValueError, match="cannot be used"):
        step(wrapped, x, fails=True)
    assert wrapped.module is model


def test_a_module_with_a_part_that_is_sharded_is_refused() -> None:
    model, (x,), _ = layers(lambda: Layers(2))
    fully_shard(model.get_submodule("layers.1"))
    with pytest.raises(
        planner.PlanMismatch, match=r"a part of this module, .*is sharded by fully_shard: plan it"
    ):
        plan_of(model, (x,))
    planner.auto_checkpoint(model, budget="min")
    with pytest.raises(planner.PlanMismatch, match=r"before it is sharded.*with example inputs"):
        model(x)
