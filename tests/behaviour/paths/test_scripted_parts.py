"""Steps with parts that are TorchScript are planned."""

import pytest
import torch
import torch.nn as nn

import planner
from planner.training_step.inputs import InputError
from tests.side_by_side import assert_same, left_by, no_plan_warnings


class Activated(nn.Module):
    """Layers that share a scripted activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.activation = torch.jit.script(nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x).sin())
        return x.square().mean()


class Headed(nn.Module):
    """Planned layers before and behind a scripted one with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.GELU()))
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), self.scripted)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [Activated, Headed])
def test_the_step_is_planned(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, twin, x = build(), build(), torch.randn(16, 32)
    twin.load_state_dict(model.state_dict())
    plan = planner.plan(model, (x,), budget="min")
    assert plan.coverage == "replayed"
    plan.apply(model)
    with no_plan_warnings():
        for _ in range(3):
            ours = left_by(model, lambda module: module(x).backward())
            assert_same(ours, left_by(twin, lambda module: module(x).backward()))
            model.zero_grad()
            twin.zero_grad()


def test_a_traced_module_itself_is_refused_by_its_name() -> None:
    traced = torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))
    with pytest.raises(InputError, match=r"which torch\.jit made: plan the module"):
        planner.plan(traced, (torch.ones(2, 8),), budget="min")
