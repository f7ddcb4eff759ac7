"""Steps that take what is predicted, to the byte, where PyTorch does something else without data."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanWarning
from planner.verification.measure import measure_peak
from tests.side_by_side import AfterALayer, exact_plan_of


def with_a_fork(y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        dropped = F.dropout(y, 0.3, True)
    return dropped * y


def with_a_state(y: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    dropped = F.dropout(y, 0.3, True)
    torch.set_rng_state(state)
    return dropped * F.dropout(y, 0.3, True)


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers drawn in a fork of the generator": with_a_fork,
    "a state of the generator": with_a_state,
    "partial products": lambda y: (y * 0.01 + 1).cumprod(1),
    "partial products along columns": lambda y: ((y + 3).cumprod(-2) * y).sum(1),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_takes_what_is_predicted(name: str) -> None:
    torch.manual_seed(0)
    exact_plan_of(AfterALayer(STEPS[name]), (torch.randn(256, 64),), budget="150%")


class Reads(nn.Module):
    """Reads an array of numpy's, in a copy or where it is."""

    def __init__(self, read: Callable[[np.ndarray], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(64, 64), read

    def forward(self, x: np.ndarray) -> torch.Tensor:
        return F.gelu(self.layer(self.read(x))).square().mean()


@pytest.mark.parametrize("read", [torch.from_numpy, torch.as_tensor, torch.tensor])
def test_an_array_takes_no_memory_of_pytorch_unless_it_is_copied(
    read: Callable[[np.ndarray], torch.Tensor],
) -> None:
    exact_plan_of(Reads(read), (np.ones((256, 64), np.float32),))


class Marked(nn.Module):
    """Writes to what a mask selects, of which a step without a plan knows how much it is."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(64, 64), write
        self.register_buffer("row", torch.randn(64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.write(self.layer(x), mask, self.row).sum()


def rows(y: torch.Tensor, mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z[mask] = row
    return z


def some_of_a_larger_source(y: torch.Tensor, mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return (y + row).masked_scatter(mask[:, None].expand_as(y), y)


@pytest.mark.parametrize("write", [rows, some_of_a_larger_source])
def test_writes_at_masks_whose_values_are_known_take_what_is_predicted(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model, x = Marked(write), torch.randn(256, 64)
    mask = x[:, 0] > 1
    predicted = planner.estimate(model, (x, mask)).dynamic_peak_bytes
    model.zero_grad()
    assert measure_peak(lambda: model(x, mask).backward(), "cpu").peak_bytes == predicted


class Spoken(nn.Module):
    """A CTC loss whose lengths are tensors, of so little that they count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        probabilities = self.layer(x).log_softmax(-1)
        return F.ctc_loss(probabilities, targets, torch.full_like(lengths, len(x)), lengths)


def test_a_ctc_loss_reads_the_lengths_that_it_is_given() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, 3, (200,))
    model, args = Spoken(), (torch.randn(4, 200, 4), torch.randint(1, 5, (200, 2)), lengths)
    predicted = planner.estimate(model, args).dynamic_peak_bytes
    model.zero_grad()
    assert measure_peak(lambda: model(*args).backward(), "cpu").peak_bytes == predicted


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of all": lambda y: y.prod(),
    "of rows": lambda y: y.prod(-1),
    "of columns": lambda y: y.prod(0, keepdim=True),
    "of all, the other way round": lambda y: y.t().prod(),
    "of what lies the other way round": lambda y: y.t().prod(1),
}


@pytest.mark.graphs
@pytest.mark.parametrize("name", list(PRODUCTS))
def test_a_product_without_zeros_takes_what_is_predicted(name: str) -> None:
    torch.manual_seed(0)
    model, x = AfterALayer(lambda y: PRODUCTS[name](y * 0.01 + 1)), torch.randn(256, 64)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    with pytest.warns(PlanWarning, match=r"the gradient of torch.prod"):
        predicted = planner.estimate(model, (x,)).dynamic_peak_bytes
    step()
    model.zero_grad()
    assert measure_peak(step, "cpu").peak_bytes == predicted
