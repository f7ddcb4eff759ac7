"""Data-parallel training in two processes: with the plan inside, every rank gets what it gets without."""

import copy
import shutil
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import planner
from planner._torch import distributed
from planner.runtime import ddp
from tests.ranks import run_ranks, what_a_rank_says
from tests.side_by_side import Layers, assert_same, counting_runs, layers, left_by, no_plan_warnings, plan_of

pytestmark = pytest.mark.heavy


class Normalised(Layers):
    """With running statistics, and a head that only every other step uses."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm, self.heads = nn.BatchNorm1d(32), nn.ModuleList(nn.Linear(32, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.run(x))
        first, second = (head(x).square().mean() for head in self.heads)
        return first, second


def _batch(step: int) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def _train(model: Any, chosen: Callable[[int], slice], count: int = 3, accumulate: int = 1) -> list[Any]:
    # The buckets are so small that there are several.
    optimizer, left = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1), []
    for step in range(count):
        optimizer.zero_grad()
        # A static graph is taken down in the first backward, which has to synchronise.
        for part in range(accumulate - 1 if step else 0):
            with model.no_sync():
                sum(model(_batch(10 + part))[chosen(step)]).backward()
        outputs = model(_batch(step))
        sum(outputs[chosen(step)]).backward()
        optimizer.step()
        left.append(outputs)
    return left


def every(step: int) -> slice:
    return slice(0, 2)


def alternating(step: int) -> slice:
    return slice(step % 2, step % 2 + 1)


LOOPS: dict[str, tuple[dict[str, Any], Callable[[int], slice], int]] = {
    "plain": ({}, every, 1),
    "views of buckets": ({"gradient_as_bucket_view": True}, every, 1),
    "unused parameters": ({"find_unused_parameters": True}, alternating, 1),
    "static graph": ({"static_graph": True}, every, 1),
    "accumulating": ({}, every, 3),
    "accumulating, static graph": ({"static_graph": True}, every, 2),
}


def _compared(name: str, folder: Path) -> None:
    options, chosen, accumulate = LOOPS[name]
    model = layers(Normalised)[0]
    twin = copy.deepcopy(model)
    planner.Plan.load(folder / "plan.json").apply(model)
    model, twin = (DistributedDataParallel(m, bucket_cap_mb=0.01, **options) for m in (model, twin))
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, lambda m: _train(m, chosen, accumulate=accumulate))
    assert runs.backward == 3 + 2 * (accumulate - 1), runs.backward
    theirs = left_by(twin, lambda m: _train(m, chosen, accumulate=accumulate))
    assert_same(ours, theirs)
    assert any(g is not None for n, g in theirs.items() if ".gradient." in n)


def _applied_to_what_is_wrapped(folder: Path) -> None:
    model = DistributedDataParallel(layers(Normalised)[0], bucket_cap_mb=0.01)
    twin = DistributedDataParallel(layers(Normalised)[0], bucket_cap_mb=0.01)
    plan = planner.Plan.load(folder / "plan.json")
    for refused in (lambda: plan.apply(model), lambda: plan_of(model, (_batch(0),))):
        with pytest.raises(planner.PlanMismatch, match=r"as model\.module"):
            refused()
    plan.apply(model.module)
    with counting_runs() as runs:
        ours = left_by(model, lambda m: _train(m, every))
    assert runs.backward == 3
    assert_same(ours, left_by(twin, lambda m: _train(m, every)))


def _other_plans(folder: Path) -> None:
    model = layers(Normalised)[0]
    plan = planner.Plan.load(folder / "plan.json")
    if dist.get_rank() == 1:
        plan = plan_of(model, (_batch(0),), budget="500%", solver="none", loss=sum)
    wrapped = DistributedDataParallel(plan.apply(model))
    with pytest.raises(
        planner.PlanMismatch, match=f"rank {dist.get_rank()} trains by another plan than rank"
    ):
        wrapped(_batch(0))


def _alone(folder: Path) -> None:
    ddp.PATIENCE = timedelta(seconds=1)
    model = planner.Plan.load(folder / "plan.json").apply(layers(Normalised)[0])
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    if dist.get_rank() == 0:
        wrapped(_batch(0))  # only looks: rank 1 comes later
    dist.barrier()
    _train(wrapped, every, 1)


def _alone_at_a_file(folder: Path) -> None:
    """The store of ``init_method="file://..."`` raises another error when nobody comes."""
    store = dist.FileStore(str(folder / "store"), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "default_store", lambda: store)
        _alone(folder)


def _first_call(folder: Path) -> None:
    model = layers(Normalised)[0]
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n", loss=sum)
    wrapped, other = (DistributedDataParallel(m, bucket_cap_mb=0.01) for m in (model, twin))
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(wrapped, lambda m: _train(m, every))
    assert runs.backward == 3
    assert_same(ours, left_by(other, lambda m: _train(m, every)))
    refused = planner.auto_checkpoint(layers(Normalised)[0], budget="1KiB", solver="sqrt_n", loss=sum)
    with pytest.raises(planner.InfeasibleBudget, match="budget 1KiB") as raised:
        refused(_batch(0))
    assert raised.value.minimum_bytes > 1024


def _step_of(models: list[Any], x: torch.Tensor) -> torch.Tensor:
    """A loss outside of two models."""
    first, second = models
    loss: torch.Tensor = sum(first(x)) + second(x).square()  # type: ignore[assignment]
    return loss


def _trained_by(step: Callable[..., torch.Tensor], models: list[Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], 1e-2)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(step(models, _batch(number)))
        losses[-1].backward()
        optimizer.step()
    return losses


def _a_step(_folder: Path) -> None:
    """The function is planned, and its models are wrapped."""
    pairs = [
        [
            DistributedDataParallel(layers(kind)[0], bucket_cap_mb=0.01, **options)
            for kind, options in ((Normalised, {}), (Layers, {"gradient_as_bucket_view": True}))
        ]
        for _ in range(2)
    ]
    step = planner.step(_step_of, budget="min", solver="sqrt_n")
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(pairs[0], lambda models: _trained_by(step, models))
    assert runs.backward == 3
    assert step.plan is not None
    assert step.plan.target.parallel is not None
    assert_same(ours, left_by(pairs[1], lambda models: _trained_by(_step_of, models)))


def _rank(wanted: frozenset[str], plan: Path, folder: Path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        shutil.copy(plan, folder / "plan.json")
    dist.barrier()
    work: dict[str, Callable[[], None]] = {n: lambda n=n: _compared(n, folder) for n in LOOPS}  # type: ignore[misc]
    work["applied to what is wrapped"] = lambda: _applied_to_what_is_wrapped(folder)
    work["other plans"] = lambda: _other_plans(folder)
    work["planned at the first call"] = lambda: _first_call(folder)
    work["a step with wrapped models"] = lambda: _a_step(folder)
    work["alone"] = lambda: _alone(folder)
    work["alone, at a file"] = lambda: _alone_at_a_file(folder)
    for name, run in work.items():
        if name not in wanted:
            continue
        outcome = "fine"
        try:
            run()
        except BaseException as error:  # what the test reports
            outcome = f"{type(error).__name__}: {error}"
        (folder / f"{name}.{rank}").write_text(outcome)
        if outcome != "fine":
            break  # the ranks are no longer in step


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each loop that is asked for; all in one pair of processes."""
    tests = [item for item in request.session.items if item.path == request.path]
    wanted = frozenset(item.callspec.params["name"] for item in tests if hasattr(item, "callspec"))
    plan = tmp_path_factory.mktemp("ranks") / "plan.json"
    options: dict[str, Any] = {"loss": sum, "parallel": planner.DDP(2)}
    plan_of(layers(Normalised)[0], (torch.randn(64, 32),), **options).save(plan)
    return run_ranks(partial(_rank, wanted, plan), tmp_path_factory, "ddp")


@pytest.mark.parametrize(
    "name",
    [
        *LOOPS,
        "applied to what is wrapped",
        "other plans",
        "planned at the first call",
        "a step with wrapped models",
        "alone",
        "alone, at a file",
    ],
)
def test_two_ranks(name: str, outcomes: Path) -> None:
    for rank in range(2):
        assert what_a_rank_says(outcomes, name, rank) == "fine", f"rank {rank}"
