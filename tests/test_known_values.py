"""Masks and positions decide what runs without data too, also of tensors that are said to be on a GPU."""

from collections.abc import Iterator

import pytest
import torch

from planner._torch.without_data.fake_values import ConstantTrackingFakeMode, known_values, values_count


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
    assert (result.device, known_values(result)) == (device, None)
    counted = torch.zeros(4, dtype=torch.long, device=device)
    counted.add_(torch.randint(3, (4,), device=device))
    assert known_values(counted) is None


def test_values_are_the_host_s(device: torch.device) -> None:
    for made in (torch.arange(3, device=device), torch.full((2,), 5, device=device) + 1):
        values = known_values(made)
        assert values is not None
        assert values.device.type == "cpu"
