"""Weights that are streamed into one buffer, which a checkpointed layer fills again in the backward."""

import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import planner


class Streamed(nn.Module):
    """Multiplies by frozen weights that it copies from the host into a buffer that all layers share."""

    def __init__(self, how: str, slot: torch.Tensor) -> None:
        super().__init__()
        self.how, self.slots = how, [slot]
        self.host, self.scale = torch.randn(slot.shape) / 4, nn.Parameter(torch.ones(len(slot)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slot,) = self.slots
        getattr(self, f"_{self.how}")(slot)
        return x + torch.tanh(F.linear(x * self.scale, slot))

    def _data(self, slot: torch.Tensor) -> None:
        slot.data.copy_(self.host)

    def _parts(self, slot: torch.Tensor) -> None:
        slot.view(-1).data[:] = self.host.view(-1)

    def _out(self, slot: torch.Tensor) -> None:
        torch.mul(self.host, 1.0, out=slot.data)

    def _counted(self, slot: torch.Tensor) -> None:
        with torch.no_grad():
            slot.copy_(self.host)

    def _numpy(self, slot: torch.Tensor) -> None:
        slot.numpy()[:] = self.host.numpy()


class Stack(nn.Module):
    """Such layers, each checkpointed, or not."""

    def __init__(self, how: str, reentrant: bool | None = False) -> None:
        super().__init__()
        slot, self.reentrant = torch.zeros(16, 16), reentrant
        self.layers = nn.ModuleList(Streamed(how, slot) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize(
    "how",
    ["data", *(pytest.param(how, marks=pytest.mark.heavy) for how in ("parts", "out", "counted", "numpy"))],
)
def test_a_buffer_that_each_layer_fills_again(how: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(how), torch.randn(32, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, (x,), budget="100%", solver="none")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems


def test_a_buffer_that_numpy_fills_again_is_read_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Stack("numpy", None), torch.randn(32, 16)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", costs="roofline")
    assert plan.target.inputs == "overwritten"
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems


def test_a_weight_that_numpy_fills_again_is_refused() -> None:
    model = Stack("numpy", None)
    weight = nn.Parameter(torch.zeros(16, 16), requires_grad=False)
    for layer in model.layers:
        layer.slots = [weight]
    with pytest.raises(planner.CaptureError, match="16x16 is written to in the forward"):
        planner.plan(model, (torch.randn(32, 16),), budget="min", solver="sqrt_n", costs="roofline")
