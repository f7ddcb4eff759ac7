"""Captures hold nothing of a step's memory: no states of the random generator, no numbers of graphs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch._functorch import aot_autograd

from planner._torch.tracing.generator_states import states_apart
from planner.verification.measure import measure_peak
from tests.side_by_side import plan_of


class Broken(nn.Module):
    """So small that copies of the generator's state would be the most that its step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


class Scaled(Broken):
    """Its graphs multiply by numbers, which PyTorch keeps as tensors for a backward of each, and compute
    tables of integers, whose values it knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            sizes = torch.tensor([[4, 4], [2, 4]])
            x = x + torch.cat((sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1])).sum()
            first, second = (torch.tanh(layer(x)) * 0.5).chunk(2, -1)
            x = torch.cat((first * 0.25, second), -1) * 2.0 + x
        return x.square().mean()


class Largest(Broken):
    """A part that is not differentiated divides by the largest of some numbers, whichever that is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
            torch._dynamo.graph_break()
            scaled = x.detach() / (torch.tensor([64.0, 32.0])[None].max(-1)[0] / 2)
            torch._dynamo.graph_break()
        return x.square().mean() + scaled.mean()


class Viewed(nn.Module):
    """One of its graphs is not compiled for a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.last = nn.Linear(16, 16)

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.view(-1, 4, 4).transpose(1, 2)
        torch._dynamo.graph_break()
        return self.last(pieces.transpose(1, 2).reshape(-1, 16)) + pieces.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.tail(x).square().mean()


@pytest.mark.parametrize(("kind", "batch"), [(Broken, 8), (Scaled, 8), (Largest, 8), (Viewed, 24)])
def test_a_step_that_captures_takes_no_more_than_later_ones(kind: type[nn.Module], batch: int) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(batch, 16)
    plan = plan_of(model, (x,))
    plan.apply(model)
    peaks = []
    for _ in range(2):
        peaks.append(measure_peak(lambda: model(x).backward(), "cpu").peak_bytes)
        model.zero_grad()
    # A trace holds the tables of numbers that the code makes, here three of four numbers.
    tables = 3 * 4 * 8 if kind is Scaled else 0
    predicted = plan.predicted.dynamic_peak_bytes
    assert predicted <= peaks[0] <= predicted + tables
    assert peaks[1] == predicted


def _one_normal_number() -> None:
    torch.randn(1)


def _the_other_normal_number() -> None:
    torch.randn(2)
    torch.randn(1)


def _numbers() -> None:
    torch.rand(3)


def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("draw", [_one_normal_number, _the_other_normal_number, _numbers, _seed])
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_a_state_is_put_back(draw: Callable[[], object], drawn_before: int) -> None:
    torch.manual_seed(5)
    torch.randn(drawn_before)
    before = torch.get_rng_state()
    with states_apart(), aot_autograd.preserve_rng_state():
        draw()
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_set_where_nothing_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {}

    class Generator:
        clone_state = torch.default_generator.clone_state

        def set_state(self, state: torch.Tensor) -> None:
            kept["set"] = state

    with states_apart(), aot_autograd.preserve_rng_state():
        monkeypatch.setattr(torch, "default_generator", Generator())
    assert not kept
