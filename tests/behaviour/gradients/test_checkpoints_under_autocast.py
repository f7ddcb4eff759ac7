"""Calls of torch.utils.checkpoint in a planned model: under autocast, and where gradients end."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import planner


class Checkpointed(nn.Module):
    def __init__(self, forward: Callable[["Checkpointed", Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.c = nn.Linear(32, 4)
        self.middle = forward

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.c(self.middle(self, x)), y)


def _twice(m: Checkpointed, x: Tensor) -> Tensor:
    x = checkpoint(m.b, m.a(x), use_reentrant=False)
    return checkpoint(m.b, x, use_reentrant=False)


def _after_use(m: Checkpointed, x: Tensor) -> Tensor:
    return checkpoint(m.b, m.b(m.a(x)), use_reentrant=False)


def _reentrant_twice(m: Checkpointed, x: Tensor) -> Tensor:
    return checkpoint(m.b, checkpoint(m.b, m.a(x), use_reentrant=True), use_reentrant=True)


def _before_break(m: Checkpointed, x: Tensor) -> Tensor:
    x = _twice(m, x)
    torch._dynamo.graph_break()
    return x


def _gradients_end(m: Checkpointed, x: Tensor) -> Tensor:
    return m.a(checkpoint(m.b, x, use_reentrant=True))


def _mixed(m: Checkpointed, x: Tensor) -> Tensor:
    return m.b(m.b(checkpoint(m.b, m.a(x), use_reentrant=True)))


def _gradients(
    model: nn.Module, inputs: tuple[Tensor, Tensor], *, calls: int = 1, half: bool = True
) -> list[Tensor | None]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        loss = sum(model(*inputs) for _ in range(calls))
    loss.backward()
    return [p.grad for p in model.parameters()]


def _same(ours: list[Tensor | None], eager: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, eager, strict=True)
    )


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(64, 32), torch.randint(4, (64,))


@pytest.mark.heavy
@pytest.mark.parametrize("forward", [_twice, _after_use, _reentrant_twice, _before_break])
def test_casts_are_those_of_the_region_around_a_checkpoint(
    forward: Callable[[Checkpointed, Tensor], Tensor],
) -> None:
    inputs = _inputs()
    model = Checkpointed(forward)
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        planner.plan(model, args=inputs, budget="150%").apply(model)
    assert _same(_gradients(model, inputs), _gradients(eager, inputs))


def test_two_calls_in_a_region_of_checkpoints() -> None:
    inputs = _inputs()
    model = Checkpointed(lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=False))
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        planner.plan(model, args=inputs, budget="150%").apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)  # two forwards before a backward
        ours = _gradients(model, inputs, calls=2)
    assert _same(ours, _gradients(eager, inputs, calls=2))


def test_gradients_end_at_a_reentrant_checkpoint_without_inputs_that_have_any() -> None:
    inputs = _inputs()
    model = Checkpointed(_gradients_end)
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's: gradients will be None
        planner.plan(model, args=inputs, budget="150%").apply(model)
        ours = _gradients(model, inputs, half=False)
        assert ours[2] is None
        assert _same(ours, _gradients(eager, inputs, half=False))


@pytest.mark.graphs
def test_weights_of_a_reentrant_checkpoint_that_are_used_elsewhere_are_warned_of() -> None:
    with pytest.warns(planner.PlanWarning, match="use_reentrant=True"):
        planner.plan(Checkpointed(_mixed), args=_inputs(), budget="150%")


class Side(nn.Module):
    """An output that the planned loss does not use, behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.a(x)
        torch._dynamo.graph_break()
        return out, checkpoint(self.b, x, use_reentrant=False)


@pytest.mark.graphs
def test_a_graph_that_runs_as_it_is_draws_the_same_numbers_again_in_a_checkpoint() -> None:
    x, _ = _inputs()
    model = Side()
    eager = copy.deepcopy(model)
    planner.plan(model, args=(x,), budget="150%", loss=lambda out: out[0].sum()).apply(model)

    def gradients(module: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(1)
        first, second = module(x)
        (first.sum() + second.square().sum()).backward()
        return [p.grad for p in module.parameters()]

    with pytest.warns(planner.PlanWarning, match="leaves unused"):
        ours = gradients(model)
    assert _same(ours, gradients(eager))
