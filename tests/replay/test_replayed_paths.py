"""Replayed plans on paths, and with sizes, that the plan has not seen: exact, and told of."""

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner.replay.unplanned_memory import UnplannedMemory
from planner.verification.measure import measure_peak
from tests.replay.test_replayed import _planned, _same

pytestmark = [pytest.mark.any_torch, pytest.mark.heavy]


def _peak(model: nn.Module, *inputs: Any) -> int:
    model.zero_grad()
    return measure_peak(lambda: model(*inputs).backward(), "cpu").peak_bytes


def _applied(model: nn.Module, x: torch.Tensor) -> planner.Plan:
    """A plan that the model trains by, to the byte and without a word."""
    plan = _planned(model, x)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _peak(model, x) == plan.predicted.dynamic_peak_bytes
    return plan


class Experts(nn.Module):
    """Rows are sent to layers by data."""

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        kind = x[:, 0].clamp(0, len(self.layers) - 1).long()
        y = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = torch.where(kind == number)[0]
            y = y.index_add(0, rows, layer(x[rows]))
        return y.square().mean()


def test_sizes_that_data_set_are_told_of() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(60, 32)
    x[:, 0] = torch.arange(60) // 20
    eager = copy.deepcopy(model)
    plan = _applied(model, x)
    x[:, 0] = 2
    with pytest.warns(
        planner.PlanWarning, match="saves takes .* bytes instead of .* Plan it where it takes most"
    ):
        peak = _peak(model, x)
    assert peak > plan.predicted.dynamic_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert _same(model, eager, lambda one: one(x).backward())


class Recycles(nn.Module):
    """Passes of which all but the last are without gradients."""

    def __init__(self, width: int = 64, layers: int = 3, given: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)
        )
        self.norm, self.passes, self.given = nn.LayerNorm(width), 2, given

    def forward(self, x: Tensor) -> Tensor:
        previous = torch.zeros_like(x) if self.given else None
        y = x
        for number in range(self.passes):
            with torch.set_grad_enabled(number == self.passes - 1):
                y = x if previous is None else x + self.norm(previous)
                for layer in self.layers:
                    y = y + layer(y)
                previous = y.detach()
        return y.square().mean()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("planned", "passes"), [(1, 3), (3, 1), (2, 5)])
def test_on_another_path_the_plan_goes_on_behind_it(planned: int, passes: int, given: bool) -> None:
    torch.manual_seed(0)
    model, x = Recycles(given=given, layers=8), torch.randn(256, 64)
    model.passes = planned
    eager = copy.deepcopy(model)
    plan = _planned(model, x)
    plan.apply(model)
    model.passes = eager.passes = passes
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        peak = _peak(model, x)
    assert said or peak <= plan.predicted.dynamic_peak_bytes
    saved = plan.baseline.dynamic_peak_bytes - plan.predicted.dynamic_peak_bytes
    assert peak < _peak(eager, x) - saved // 2
    assert _same(model, eager, lambda one: one(x).backward())


class Beside(nn.Module):
    """Makes a large tensor that the plan has not seen, at its peak."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.GELU()) for _ in range(4))
        self.layers = nn.Sequential(*parts)
        self.more = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        with torch.no_grad():
            if self.more:
                self.seen = F.one_hot(y.argmax(-1), 500)
        return y.square().mean()


def test_calls_that_the_plan_has_not_seen_are_told_of_where_they_do_not_fit() -> None:
    torch.manual_seed(0)
    model, x = Beside(), torch.randn(64, 32)
    eager = copy.deepcopy(model)
    plan = _applied(model, x)
    model.more = eager.more = True
    with pytest.warns(planner.PlanWarning, match="none of the plan's make .* bytes more than there is room"):
        assert _peak(model, x) > plan.predicted.dynamic_peak_bytes
    del model.seen
    assert _same(model, eager, lambda one: one(x).backward())


class Sparse(nn.Module):
    """At one place takes a product with a sparse matrix, which autograd saves, or a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.matrix, self.other = torch.eye(32).to_sparse(), False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
            x = torch.sparse.mm(self.matrix, x) if self.other else x.sin()
        return x.square().mean()


class WritesOver(nn.Module):
    """Writes over what is made, by one of two paths, a few calls before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.other = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            z = (x @ self.a.weight.t()) * 1.5 if self.other else self.a(x)
            v = self.b(x).sin().cos()
            x = self.c(F.silu(z, inplace=True) * v)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.parametrize("build", [Sparse, WritesOver])
def test_on_another_path_what_cannot_be_read_again_is_kept(build: Any) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(32, 32)
    eager = copy.deepcopy(model)
    plan = _planned(model, x)
    assert plan.recomputed_operations
    plan.apply(model)
    model.other = eager.other = True
    assert _same(model, eager, lambda one: one(x).backward())


def test_memory_that_is_freed_after_an_error_has_ended_the_step_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    position, made = 2, [torch.empty(1)]
    memory = UnplannedMemory([8, 8, 8], lambda: position)
    memory.call_made([], made)
    position = 0  # as of a step that is gone
    made.clear()
    assert not raised
