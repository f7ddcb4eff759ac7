"""Writes in place into a part of a larger tensor: results have the strides that they have without a plan."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from tests.side_by_side import assert_same, left_by, no_plan_warnings, plan_of

Write = Callable[[torch.Tensor], torch.Tensor]

WIDTH = 20
"""Not a multiple of what kernels take at once: rows that touch are computed otherwise than rows apart."""


class Written(nn.Module):
    """For each of some functions a linear layer, to whose result it writes, and a layer after that."""

    def __init__(self, writes: Sequence[Write]) -> None:
        super().__init__()
        self.writes = writes
        self.first = nn.ModuleList(nn.Linear(8, 3 * WIDTH) for _ in writes)
        self.second = nn.ModuleList(nn.LazyLinear(8) for _ in writes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for write, first, second in zip(self.writes, self.first, self.second, strict=True):
            total = total + second(write(first(x)).sigmoid()).square().mean()
        return total


class Cells(nn.Module):
    """A recurrent cell that runs a few times."""

    def __init__(self, kind: type[nn.RNNCellBase], width: int) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(8, width), kind(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        state: Any = (x.tanh(), x) if isinstance(self.cell, nn.LSTMCell) else x.tanh()
        for _ in range(2):
            state = self.cell(x, state)
        return (state[0] if isinstance(state, tuple) else state).square().mean()


def _chunk(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.unsafe_chunk(3, 1)
    return a.add_(b).sigmoid_() * c


def _split(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.unsafe_split(WIDTH, 1)
    return a.mul_(b.tanh_()).exp_() * c


def _split_with_sizes(y: torch.Tensor) -> torch.Tensor:
    a, b, _ = y.unsafe_split_with_sizes([WIDTH + 3, WIDTH - 3, WIDTH], 1)
    return torch.cat([F.silu(a, inplace=True).expm1_(), b.clamp_(-0.3).log1p_()], 1)


def _transposed(y: torch.Tensor) -> torch.Tensor:
    a, b, _ = y.t().unsafe_chunk(3)
    return a.cumsum_(0).sigmoid_().t() * b.t()


def _product(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.unsafe_chunk(3, 1)
    return a.addmm_(b.tanh(), torch.ones(WIDTH, WIDTH) / 7).mul_(c).sigmoid_()


def _through_views(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.unsafe_chunk(3, 1)
    a.t().tanh_()
    b.view(-1, 4, WIDTH // 4).sigmoid_()
    c[:, 3:].exp_()
    return (a.log1p() + b.log1p()) * c.sigmoid()


def _moved(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.unsafe_chunk(3, 1)
    return a.masked_fill_(b > 0.5, 0.3).sigmoid_() + b.copy_(c).tanh_()


def _other_type(y: torch.Tensor) -> torch.Tensor:
    a, b, _ = y.unsafe_chunk(3, 1)
    return a.add_(b.double() / 3).sigmoid_()


def _dropped(y: torch.Tensor) -> torch.Tensor:
    a, b, _ = y.unsafe_chunk(3, 1)
    return F.dropout(a, 0.3, inplace=True).sigmoid_() * b


def _lists(y: torch.Tensor) -> torch.Tensor:
    chunks = y.unsafe_chunk(3, 1)
    torch._foreach_mul_(chunks, 0.7)
    torch._foreach_sigmoid_(chunks[:2])
    return chunks[0] * chunks[1] + chunks[2].tanh_()


def _drawn_into_a_view(y: torch.Tensor) -> torch.Tensor:
    return y[:, :WIDTH] * torch.empty(len(y), 3 * WIDTH)[:, :WIDTH].normal_()


def _drawn_into_a_stretch(y: torch.Tensor) -> torch.Tensor:
    return y * torch.empty_strided(y.shape, (100, 1)).normal_().uniform_(0, 0.7).sigmoid_()


def _product_in_a_view(y: torch.Tensor) -> torch.Tensor:
    held = torch.zeros(WIDTH, 3 * WIDTH).t()
    held[:WIDTH].addmm_(y.t()[:WIDTH], y[:, :WIDTH])
    return held.sigmoid()


def _looks_elsewhere(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.unsafe_chunk(3, 1)
    a = (a + 1).transpose_(0, 1).unsqueeze_(0).squeeze_(0).t_()
    a = a * (b + 1).swapaxes_(0, 1).as_strided_(b.shape, (1, len(b))) * c
    return a * (y + 1).t_()[:WIDTH].t()


WRITES = (
    _chunk, _split, _split_with_sizes, _transposed, _product, _moved, _through_views, _other_type, _dropped,
    _lists, _drawn_into_a_view, _drawn_into_a_stretch, _product_in_a_view, _looks_elsewhere,
)  # fmt: skip


def _loop(*inputs: torch.Tensor) -> Callable[[Any], list[torch.Tensor]]:
    def loop(network: Any) -> list[torch.Tensor]:
        losses = [network(x) for x in inputs]
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses]

    return loop


def _alike(model: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> None:
    twin = copy.deepcopy(model)
    plan_of(model, (x,)).apply(model)
    with no_plan_warnings():
        ours = left_by(model, _loop(x, *others))
    assert_same(ours, left_by(twin, _loop(x, *others)))


def _written(*writes: Write) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Written(writes).train(), torch.randn(20, 8)
    model(x)
    return model, x


@pytest.mark.graphs
@pytest.mark.heavy
def test_writes_into_a_stretch_of_a_result() -> None:
    model, x = _written(*WRITES)
    report = planner.verify(model, (x,), plan=plan_of(model, (x,)), repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_such_writes_at_sizes_that_vary() -> None:
    model, x = _written(_chunk, _through_views, _drawn_into_a_view)
    _alike(model, x, torch.randn(17, 8), torch.randn(13, 8))


def _scaled(y: torch.Tensor) -> torch.Tensor:
    scaled = y.clone()
    scaled[:, :WIDTH].mul_(2)
    first = scaled[:, WIDTH:]
    first.mul_(0.5).div_(3)
    return scaled * first.sum()


def test_a_view_that_is_multiplied_by_a_number_keeps_nobody_waiting() -> None:
    model, x = _written(_scaled)
    _alike(model, x)


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (nn.GRUCell, 20),
        *(pytest.param(*c, marks=pytest.mark.heavy) for c in ((nn.GRUCell, 16), (nn.LSTMCell, 20))),
    ],
)
def test_recurrent_cells(kind: type[nn.RNNCellBase], width: int) -> None:
    torch.manual_seed(0)
    _alike(Cells(kind, width).train(), torch.randn(20, 8))


class WritesToItsInput(nn.Module):
    """Writes to its argument, a stretch of something larger, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x.mul_(0.5).sigmoid_().log1p()).square().mean()


def test_an_input_that_is_a_stretch_of_something_larger() -> None:
    torch.manual_seed(0)
    model, whole = WritesToItsInput(), torch.randn(20, 3 * WIDTH)
    twin, theirs = copy.deepcopy(model), whole.clone()
    plan_of(model, (whole.clone()[:, :WIDTH],)).apply(model)
    ours = left_by(model, _loop(whole[:, :WIDTH]))
    assert_same(ours, left_by(twin, _loop(theirs[:, :WIDTH])))
    assert torch.equal(whole, theirs)


class Shifted(nn.Module):
    """Moves some of the positions that it looks up, as models of images and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        places = torch.arange(16).view(2, 8) + start
        places[0] += 3
        return self.out(self.table(places)).tanh().square().mean()


def test_a_number_that_is_added_to_some_integers_is_saved_by_nobody() -> None:
    model, start = Shifted().train(), torch.tensor(2)
    plan = planner.plan(model, start, budget="min", solver="sqrt_n")
    report = planner.verify(model, start, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
