"""Two processes under ``fully_shard`` whose plans are replayed: what is not gathered is not read."""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import planner
from planner.verification.measure import measure_peak
from tests.gloo import pauses
from tests.ranks import run_ranks, say_each, what_a_rank_says
from tests.side_by_side import counting_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class Layer(nn.Module):
    """Leaves what it computed among its attributes, and passes more than one tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.left: Tensor | None = None

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(self.up(self.norm(x)))
        self.left = torch.sigmoid(x) * torch.tanh(y.detach()).mean(-1, keepdim=True)
        return x + F.dropout(self.down(y * scale), 0.1, self.training), torch.tanh(y.mean(-1, keepdim=True))


class Net(nn.Module):
    """Layers that read what the root made and what other layers made; returns two losses.

    Args:
        leaves: Whether the second loss is of what the first layer left among its attributes.
        twice: Whether the first layer runs a second time at the end.
    """

    def __init__(self, *, leaves: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 32), nn.ModuleList(Layer() for _ in range(3))
        self.head, self.leaves, self.twice = nn.Linear(32, 16), leaves, twice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.exp(torch.tanh(self.first(x)).mean(-1, keepdim=True))
        x, passed = F.silu(self.first(x)), []
        for layer in [*self.layers, *list(self.layers)[: self.twice]]:
            x, more = layer(x, scale)
            scale = scale * torch.sigmoid(more)
            passed.append(more)
        left: Any = self.layers[0].left
        other = left if self.leaves else torch.cat(passed, -1)
        return torch.tanh(self.head(x)).square().mean(), other.square().mean()


Backward = Callable[[Tensor, Tensor], object]


def _sum(one: Tensor, other: Tensor) -> None:
    (one + other).backward()


def _only_the_other(_: Tensor, other: Tensor) -> None:
    other.backward()


def _in_turn(one: Tensor, other: Tensor) -> None:
    one.backward(retain_graph=True)
    other.backward()


def _net(**options: bool) -> Any:
    torch.manual_seed(0)
    return Net(**options).train()


def _x(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 24, 16, generator=torch.Generator().manual_seed(10 * step + rank))


LAYERS = ("layers.0", "layers.1", "layers.2")


def _shard(model: nn.Module, units: Sequence[str] = LAYERS, *, reshard: bool = True) -> Any:
    for name in units:
        fully_shard(model.get_submodule(name), reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def _trained(model: Any, backward: Backward, micro_batches: int = 1) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        for part in range(micro_batches):
            model.set_requires_gradient_sync(part == micro_batches - 1)
            backward(*model(_x(dist.get_rank(), 3 * step + part)))
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict().items()
    return {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state}


def _same_plan(model: nn.Module, **options: Any) -> planner.Plan:
    text: list[Any] = [None]
    if dist.get_rank() == 0:
        options = {"parallel": planner.FSDP2(2), "loss": sum, "costs": "roofline", **options}
        plan = planner.plan(model, (_x(0),), budget="min", solver="sqrt_n", backend="replay", **options)
        text = [plan.dumps()]
    dist.broadcast_object_list(text)
    return planner.Plan.loads(text[0])


def _compared(
    make: Callable[[], Any],
    backward: Backward = _sum,
    shard: Callable[[nn.Module], Any] = _shard,
    micro_batches: int = 1,
    peak: bool = True,
    **options: Any,
) -> str:
    plan = _same_plan(make(), **options)
    theirs = _trained(shard(make()), backward, micro_batches)
    with counting_runs() as runs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", planner.PlanWarning)
        model = shard(plan.apply(make()))
        ours = _trained(model, backward, micro_batches)
    said = [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)]
    unequal = [n for n, value in theirs.items() if not torch.equal(ours[n], value)]
    if peak:
        x = _x(dist.get_rank())
        with pauses():
            for _ in range(3):
                peaks = measure_peak(lambda: backward(*model(x)), "cpu").peak_bytes
                model.zero_grad()
        if peaks != plan.predicted.dynamic_peak_bytes:
            said.append(f"measured {peaks}, predicted {plan.predicted.dynamic_peak_bytes}")
    if not plan.recomputed_operations:
        said.append("nothing runs again")
    return "\n".join([f"{runs.replayed} followed, {unequal or 'all'} equal", *said])


def _other_units(model: nn.Module) -> Any:
    return _shard(model, ("layers.0.up", "layers.1", "layers.2"))


CASES: dict[str, Callable[[], str]] = {
    "what crosses units": lambda: _compared(_net),
    "one unit": lambda: _compared(_net, shard=lambda model: _shard(model, ()), regions=[]),
    "kept gathered": lambda: _compared(
        _net, shard=lambda model: _shard(model, reshard=False), parallel=planner.FSDP2(2, False)
    ),
    "a unit runs twice": lambda: _compared(lambda: _net(twice=True)),
    "asked for while its unit is not gathered": lambda: _compared(
        lambda: _net(leaves=True), _only_the_other, loss=lambda losses: losses[1]
    ),
    "losses in turn": lambda: _compared(_net, _in_turn, peak=False),
    "micro-batches": lambda: _compared(
        _net, micro_batches=2, peak=False, parallel=planner.FSDP2(2, no_sync=True)
    ),
}
NOT_FOLLOWED: dict[str, Callable[[], str]] = {
    "other units": lambda: _compared(_net, shard=_other_units, peak=False),
    "a plan for one process": lambda: _compared(_net, peak=False, parallel=None),
}


def _with_other_plans() -> str:
    solver = "none" if dist.get_rank() == 1 else "sqrt_n"
    plan = planner.plan(
        _net(),
        (_x(0),),
        budget="500%" if solver == "none" else "min",
        solver=solver,
        loss=sum,
        backend="replay",
        parallel=planner.FSDP2(2),
    )
    model = _shard(plan.apply(_net()))
    try:
        model(_x(dist.get_rank()))
    except planner.PlanMismatch as error:
        return str(error)
    return "fine"


def _rank(folder: Path) -> None:
    every = {**CASES, **NOT_FOLLOWED, "other plans": _with_other_plans}
    say_each(every, lambda name: every[name](), folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each case; all in one pair of processes."""
    return run_ranks(_rank, tmp_path_factory, "replayed")


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_without_a_plan_and_take_what_is_predicted(name: str, outcomes: Path) -> None:
    steps = 6 if name == "micro-batches" else 3
    for rank in range(2):
        said, *warned = what_a_rank_says(outcomes, name, rank).splitlines()
        assert said == f"{steps} followed, all equal"
        if name == "losses in turn":  # whether another order is told of depends on what the plan makes again
            warned = [text for text in warned if "another order" not in text]
        assert ["retain_graph=True" in text for text in warned] == [True] * (name == "losses in turn"), warned


@pytest.mark.heavy
@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_parts_that_are_sharded_otherwise_run_without_the_plan(name: str, outcomes: Path) -> None:
    for rank in range(2):
        said = what_a_rank_says(outcomes, name, rank)
        assert said.startswith("0 followed, all equal")
        assert "steps run as they are, without the plan" in said


@pytest.mark.heavy
def test_ranks_with_other_plans_are_an_error(outcomes: Path) -> None:
    for rank in range(2):
        said = what_a_rank_says(outcomes, "other plans", rank)
        assert said.startswith(f"rank {rank} trains by another plan than rank {1 - rank}")
