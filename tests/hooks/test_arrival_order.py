"""Gradients arrive in eager's order: DistributedDataParallel adds them up by it, and hooks see it."""

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch import distributed, tensors
from planner.runtime import ddp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class Shared(nn.Module):
    """Norms, weights that one product reads at once, and a layer that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = x + self.shared(norm(x)).tanh()
        return torch.addmm(self.bias, x.tanh(), self.weight).square().mean()


def _transformer() -> nn.Module:
    blocks: Any = importlib.import_module("blocks")
    return blocks.build_model()


def _words() -> torch.Tensor:
    blocks: Any = importlib.import_module("blocks")
    return blocks.batch(0, 0)


def _arrivals(model: nn.Module, x: torch.Tensor) -> list[str]:
    arrived: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        for name, p in model.named_parameters()
    ]
    model(x).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return arrived


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, Any]]] = {
    "shared": (Shared, lambda: torch.randn(8, 16), {}),
    "transformer": (_transformer, _words, {}),
    "transformer in regions": (_transformer, _words, {"regions": "layers.*"}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.heavy) if "transformer" in name else name for name in CASES],
)
def test_gradients_arrive_in_eager_s_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch, options = CASES[name]
    torch.manual_seed(0)
    model, x = build().train(), batch()
    expected = _arrivals(copy.deepcopy(model), x)
    assert len(expected) == len(list(model.parameters()))
    planner.plan(model, (x,), budget="min", solver="sqrt_n", **options).apply(model)
    with monkeypatch.context() as without:
        without.setattr(tensors, "has_hooks_on_arrival", lambda _: False)
        assert _arrivals(model, x) != expected  # a graph is one node: its gradients arrive in any order
        without.setattr(distributed, "active_data_parallel_group", object)
        without.setattr(ddp.RankCheck, "__call__", lambda self: True)
        assert _arrivals(model, x) == expected
    assert _arrivals(model, x) == expected


@pytest.mark.parametrize("after", [False, True])
def test_hooks_on_weights_draw_numbers_in_eager_s_order(after: bool) -> None:
    def add_noise(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.add_(torch.randn_like(weight))

    def noisy(weight: nn.Parameter) -> None:
        if after:
            weight.register_post_accumulate_grad_hook(add_noise)
        else:
            weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))

    torch.manual_seed(0)
    model, x = Shared(), torch.randn(8, 16)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
    gradients = []
    for planned in (False, True):
        trained = copy.deepcopy(model)
        if planned:
            plan.apply(trained)
        for weight in trained.parameters():
            noisy(weight)
        torch.manual_seed(1)
        trained(x).backward()
        gradients.append([p.grad for p in trained.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
