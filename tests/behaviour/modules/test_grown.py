"""Parameters that are replaced by larger ones, or added to, while a module trains under auto_checkpoint."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak

PARTS = ("means", "colours", "opacities")


class Splats(nn.Module):
    """Gaussians in a plane, seen at points."""

    def __init__(self, count: int = 128) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.randn(count, 2))
        self.colours, self.opacities = nn.Parameter(torch.rand(count, 3)), nn.Parameter(torch.zeros(count))
        self.later = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, points: Tensor) -> Tensor:
        distances = (points[:, None] - self.means).square().sum(-1)
        weights = torch.exp(-distances) * self.opacities.sigmoid()
        x = (weights / weights.sum(1, keepdim=True)) @ self.colours
        for layer in self.later:
            x = layer(x).tanh()
        return x.square().mean()


def _replaced(model: Any, optimizer: torch.optim.Optimizer, change: Callable[[Tensor], Tensor]) -> None:
    """As densification does it: parameters, and what the optimizer knows of them, are other ones."""
    for name in PARTS:
        old = getattr(model, name)
        new = nn.Parameter(change(old.detach()))
        setattr(model, name, new)
        group = optimizer.param_groups[0]
        group["params"] = [new if p is old else p for p in group["params"]]
        state = optimizer.state.pop(old)
        optimizer.state[new] = {k: change(v) if v.dim() else v for k, v in state.items()}


def _longer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    _replaced(model, optimizer, lambda t: torch.cat([t, t * 0.9]))


def _shorter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    _replaced(model, optimizer, lambda t: t[::2].clone())


def _longer_in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for name in PARTS:
        parameter = getattr(model, name)
        parameter.data = torch.cat([parameter.data, parameter.data * 0.9])
        parameter.grad = None
        optimizer.state.pop(parameter)


def _wider(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Linear(3, 256), nn.Linear(256, 3))
    model.later.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})


def _trains_alike(changes: list[Callable[..., None] | None]) -> list[planner.Plan]:
    """The plans by which a model trains for two steps after each change, whose peaks they predict."""
    torch.manual_seed(0)
    model, points = Splats(), torch.rand(256, 2)
    eager, plans = copy.deepcopy(model), []
    planner.auto_checkpoint(model, budget="60%", costs="roofline")
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, eager)]
    for change in changes:
        for each, optimizer in zip((model, eager), optimizers, strict=True):
            if change is not None:
                change(each, optimizer)
            for again in (False, True):
                optimizer.zero_grad()
                step = lambda: each(points).backward()  # noqa: B023, E731
                peak = measure_peak(step, "cpu").peak_bytes if again else step()
                optimizer.step()
            if each is model:
                plans.append(planner.Plan.of(installed_plan(model)))
                assert peak is not None
                assert peak <= plans[-1].predicted.dynamic_peak_bytes
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    return plans


@pytest.mark.filterwarnings("error::planner.PlanWarning")
@pytest.mark.parametrize(
    "change",
    [
        _longer,
        pytest.param(_longer_in_place, marks=pytest.mark.heavy),
        pytest.param(_wider, marks=pytest.mark.heavy),
    ],
)
def test_larger_parameters_are_planned_again(
    change: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = _trains_alike([None, change])
    assert after.resident.parameter_bytes > before.resident.parameter_bytes
    assert capsys.readouterr().err.count("planned again, as the parameters take") == 1


@pytest.mark.heavy
@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_parameters_that_grow_and_shrink_by_turns_are_planned_for_the_largest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _trains_alike([None, _longer, _shorter, _longer, _shorter])
    assert capsys.readouterr().err.count("planned again, as the parameters take") == 1
