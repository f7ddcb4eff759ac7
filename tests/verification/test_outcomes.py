"""What steps leave is compared where kernels are not deterministic, and kept where there is memory."""

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

import planner
from planner.errors import PlanWarning
from planner.verification import compared_steps, outcomes, recheck, verify
from planner.verification.outcomes import Spread, difference, distance, on_host, same

NAN, INF = math.nan, math.inf


def left(value: torch.Tensor) -> Any:
    return SimpleNamespace(tensors={("buffer", "x"): value})


def spread_of(*values: torch.Tensor, allowed: bool = True) -> tuple[float, bool]:
    spread = Spread(left(values[0]), allowed)
    for value in values[1:]:
        spread.add(left(value))
    return spread.of(("buffer", "x")), spread.incomparable(("buffer", "x"))


def test_nans_in_the_same_places_are_no_spread() -> None:
    a, b = torch.tensor([1.0, NAN, INF, -INF]), torch.tensor([1.5, NAN, INF, -INF])
    assert spread_of(a, a.clone()) == (0.0, False)
    assert spread_of(a, b) == (0.5, False)
    assert same(a, b, 0.5)
    assert not same(a, torch.tensor([NAN, NAN, INF, -INF]), 0.5)
    assert not same(a, b, 0.0)


def test_nans_in_other_places_cannot_be_compared() -> None:
    a, b = torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])
    assert spread_of(a, b) == (0.0, True)
    assert distance(torch.tensor([INF]), torch.tensor([-INF])) == INF


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.complex64])
def test_buffers_that_are_no_floats_can_differ(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 1, 1]).to(dtype)
    apart, incomparable = spread_of(a, b)
    assert incomparable == (dtype is torch.bool)
    assert apart == (0.0 if dtype is torch.bool else 1.0)
    assert same(a, b, apart) == (dtype is not torch.bool)
    assert "1 of 3 elements" in difference(a, b)


def test_dense_and_sparse_gradients_are_not_the_same() -> None:
    dense, sparse = torch.eye(2), torch.eye(2).to_sparse()
    for a, b in ((dense, sparse), (sparse, dense)):
        assert not same(a, b, 1.0)
        assert distance(a, b) == INF
    assert difference(dense, sparse) == (
        "(2, 2) torch.float32 without the plan, (2, 2) torch.float32, sparse_coo with it"
    )


def test_differences_tell_of_nans() -> None:
    assert difference(torch.tensor([NAN, 1.0]), torch.tensor([NAN, NAN])) == "1 of 2 elements, by at most inf"


def test_the_most_of_several_steps_counts() -> None:
    values = [torch.tensor([x]) for x in (1.0, 1.0, 1.25, 1.0)]
    assert spread_of(*values) == (0.25, False)
    assert spread_of(*values, allowed=False) == (0.0, True)


def test_copies_are_on_the_host() -> None:
    x = torch.ones(2)
    assert on_host(x).data_ptr() != x.data_ptr()
    with FakeTensorMode():
        assert on_host(torch.empty(3, device="cuda:0")).device.type == "cpu"


class Marked(nn.Module):
    """A layer, and a buffer of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


UNPLANNED, PLANNED = 5, 2
"""Steps that are taken first of each side, as on a GPU."""


def verified_with_noise(monkeypatch: pytest.MonkeyPatch, noisy: Callable[[int], bool]) -> tuple[Any, int]:
    """A verification in which steps leave a gradient with another last bit, by their number from 1; returns
    the report, and how many steps were compared."""
    model, args = Marked(), (torch.randn(2, 4),)
    plan = planner.plan(model, args, budget="100GiB", solver="none")
    steps: list[outcomes.Outcome] = []

    class Noisy(outcomes.Outcome):
        """As sums in any order are."""

        def __init__(self, *taken: Any) -> None:
            super().__init__(*taken)
            steps.append(self)
            if noisy(len(steps)):
                gradient = self.tensors["gradient of", "layer.weight"]
                assert gradient is not None
                gradient += 1e-7

    monkeypatch.setattr(compared_steps, "Outcome", Noisy)
    usual = verify._unplanned_count(torch.device("cuda"))
    assert usual == UNPLANNED
    monkeypatch.setattr(verify, "_unplanned_count", lambda device: usual)
    monkeypatch.setattr(verify, "Spread", lambda reference, allowed: Spread(reference, True))
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    return report, len(steps)


@pytest.mark.heavy
def test_steps_of_a_gpu_are_taken_often_and_kept_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    report, steps = verified_with_noise(monkeypatch, lambda number: number in (4, 7))
    assert steps == UNPLANNED + PLANNED
    assert report.ok
    assert not report.exact


def test_what_differs_is_compared_with_more_unplanned_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of these shows what the planned step showed before."""
    report, steps = verified_with_noise(monkeypatch, lambda number: number in (7, 11))
    assert steps == 11
    assert report.ok
    assert not report.exact


def test_what_differs_still_must_be_equal_by_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    report, steps = verified_with_noise(monkeypatch, lambda number: number == 7)
    assert steps == UNPLANNED + PLANNED + recheck.MORE_STEPS + 4
    assert report.ok
    assert not report.exact


def test_a_difference_by_deterministic_kernels_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    last = UNPLANNED + PLANNED + recheck.MORE_STEPS + 4
    planned = {6, 7, last - 1, last}
    report, steps = verified_with_noise(monkeypatch, lambda number: number in planned)
    assert steps == last
    assert not report.gradients_equal
    assert ["layer.weight" in problem for problem in report.problems] == [True]


def test_steps_that_did_not_run_by_the_plan_have_nothing_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> outcomes.Outcome:
        if torch.are_deterministic_algorithms_enabled():
            warnings.warn("the step runs without the plan", PlanWarning, stacklevel=1)
        return left(torch.ones(2))

    spread = Spread(left(torch.ones(2)), True)
    with pytest.warns(PlanWarning, match="without the plan"):
        recheck.recheck(spread, left(torch.zeros(2)), step, step)
    assert spread.differing(left(torch.zeros(2))) == [("buffer", "x")]


def test_distances_of_large_tensors_are_of_all_elements() -> None:
    a = torch.zeros(3000, dtype=torch.float32)
    b = a.clone()
    b[17], b[-1] = 0.25, -0.5
    assert distance(a, b) == 0.5
