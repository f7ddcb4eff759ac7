"""Masks and positions decide what runs without data too, also of tensors that are said to be on a GPU."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn

from planner._torch.fake import storage_key
from planner._torch.without_data.fake_values import (
    ConstantTrackingFakeMode,
    know_values,
    known_values,
    values_count,
)
from tests.side_by_side import assert_same, left_by, no_plan_warnings, plan_of


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device in whose mode a test runs; nothing runs on it."""
    with ConstantTrackingFakeMode(allow_non_fake_inputs=True), values_count(), torch.no_grad():
        yield torch.device(request.param)


def test_what_a_step_makes_is_known(device: torch.device) -> None:
    positions = torch.arange(6, device=device)
    assert positions.device == device
    mask = torch.full((2, 6), True, device=device)
    assert mask.all()
    mask.select(0, 0).logical_and_(positions < 4)
    assert mask.device == mask.all().device == device
    assert not mask.all()
    assert mask.sum().item() == 10
    assert torch.where(mask, 1, torch.tensor(5, device=device)).max() == 5
    assert torch.ones(3, dtype=torch.long, device=device).add_(positions.narrow(0, 3, 3)).tolist() == [
        4,
        5,
        6,
    ]
    assert positions.new_zeros(2).device == device


def test_views_share_what_is_written(device: torch.device) -> None:
    table = torch.zeros(3, 3, dtype=torch.long, device=device)
    row = table.select(0, 1)
    row.fill_(7)
    assert table.sum() == 21
    assert row.device == device


def test_values_move_between_devices(device: torch.device) -> None:
    there = torch.arange(3).to(device)
    assert there.device == device
    assert there.max() == 2
    back = (there + torch.tensor(1)).cpu()
    assert back.device.type == "cpu"
    assert back.tolist() == [1, 2, 3]
    listed = torch.tensor([4, 5], device=device)
    assert (listed.device, listed.max().item()) == (device, 5)


def test_what_is_known_meets_what_is_not(device: torch.device) -> None:
    mask = torch.arange(4, device=device) > 1
    data = torch.randn(4, device=device)
    result = torch.where(mask, data, 0.0)
    assert (result.device, known_values([result])) == (device, [None])
    counted = torch.zeros(4, dtype=torch.long, device=device)
    counted.add_(torch.randint(3, (4,), device=device))
    assert known_values([counted]) == [None]


def test_values_are_the_host_s(device: torch.device) -> None:
    for made in (torch.arange(3, device=device), torch.full((2,), 5, device=device) + 1):
        (values,) = known_values([made])
        assert values is not None
        assert values.device.type == "cpu"


def test_values_that_are_handed_on_are_of_the_new_tensors(device: torch.device) -> None:
    first = torch.arange(6, device=device)
    known = known_values([first, first.view(2, 3)])
    first.add_(10)
    for _ in range(2):
        again, rows = (made := torch.empty(6, dtype=torch.long, device=device)), made.view(2, 3)
        know_values([again, rows], known)
        row = rows.select(0, 1)
        assert storage_key(row) == storage_key(again) != storage_key(first)
        row.mul_(2)
        assert again.tolist() == [0, 1, 2, 6, 8, 10]
    assert first.tolist() == [10, 11, 12, 13, 14, 15]


@torch.compiler.disable
def _add_three(positions: torch.Tensor) -> None:
    positions.add_(3)


class _Written(nn.Module):
    """Positions that a graph makes, which are written into before they decide what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, positions = self.first(x), torch.arange(4)
        _add_three(positions)
        h = h.tanh() + self.words(positions)
        return self.second(h).tanh() if int(positions[0]) == 3 else h


def test_what_is_written_into_between_graphs_is_written_into_once() -> None:
    torch.manual_seed(0)
    ours, x = _Written(), torch.randn(4, 8)
    theirs = copy.deepcopy(ours)
    plan = plan_of(ours, (x,), loss=torch.sum)
    assert sum("addmm" in op.name for graph in plan.graphs for op in graph.ops if op.phase == "forward") == 2
    plan.apply(ours)
    with no_plan_warnings():
        left = left_by(ours, lambda m: m(x).sum().backward())
    assert_same(left, left_by(theirs, lambda m: m(x).sum().backward()))
