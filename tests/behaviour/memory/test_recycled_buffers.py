"""Memory that a forward writes to where PyTorch does not count it: by ``.data``, numpy or DLPack.

Weights are streamed into one buffer, which a checkpointed layer fills again in the backward; or a result is
written over, behind a graph break.
"""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import planner

pytestmark = pytest.mark.heavy


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

    def _behind(self, slot: torch.Tensor) -> None:
        slot.data.copy_(self.host)
        torch._dynamo.graph_break()

    def _lent(self, slot: torch.Tensor) -> None:
        torch.utils.dlpack.from_dlpack(slot).copy_(self.host)


class Lent(nn.Module):
    """Fills and reads a buffer in one place, which numpy has lent its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.slot, self.scale = torch.zeros(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            torch.from_numpy(self.slot.numpy()).copy_(x[:16] * i)
            x = x + torch.tanh(F.linear(x * self.scale, self.slot))
        return x.square().mean()


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


@pytest.mark.graphs
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


@pytest.mark.graphs
def test_a_buffer_that_numpy_fills_again_is_read_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Stack("numpy", None), torch.randn(32, 16)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", costs="roofline")
    assert plan.target.inputs == "overwritten"
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.graphs
def test_a_weight_that_numpy_fills_again_is_refused() -> None:
    model = Stack("numpy", None)
    weight = nn.Parameter(torch.zeros(16, 16), requires_grad=False)
    for layer in model.layers:
        assert isinstance(layer, Streamed)
        layer.slots = [weight]
    with pytest.raises(planner.CaptureError, match="16x16 is written to in the forward"):
        planner.plan(model, (torch.randn(32, 16),), budget="min", solver="sqrt_n", costs="roofline")


_QUICK = {"budget": "min", "solver": "sqrt_n", "costs": "roofline"}


def _trains_like_eager(model: nn.Module, x: torch.Tensor, **options: object) -> bool:
    eager = copy.deepcopy(model)
    planner.plan(model, (x,), **{**_QUICK, **options}).apply(model)  # type: ignore[arg-type]
    for one in (model, eager):
        one(x).backward()
    return all(
        a.grad is b.grad is None or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(model.parameters(), eager.parameters(), strict=True)
    )


def test_a_buffer_in_a_list_that_is_filled_behind_a_break_is_read_as_it_was() -> None:
    torch.manual_seed(0)
    assert _trains_like_eager(Stack("behind", None), torch.randn(32, 16))


@pytest.mark.graphs
def test_what_is_filled_through_dlpack() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 16)
    assert _trains_like_eager(Stack("lent", None), x)
    assert _trains_like_eager(Stack("lent", None), x, backend="replay")
    with pytest.raises(planner.CaptureError, match="16x16 is written to in the forward"):
        planner.plan(Lent(), (x,), **_QUICK)  # type: ignore[arg-type]
    assert _trains_like_eager(Lent(), x, backend="replay")


class WrittenOver(nn.Module):
    """Writes over results, after others have read them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h: torch.Tensor = torch.exp(torch.tanh(layer(x)))
            read = torch.sin(h)
            torch._dynamo.graph_break()
            if self.how == "data":
                h.data.mul_(0.5)
            else:
                h.detach().numpy()[...] *= 0.5
            torch._dynamo.graph_break()
            x = x + read * h
        return x.square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_result_that_is_written_over_is_refused_in_graphs_and_not_run_again_in_replays(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 16)
    with pytest.raises(
        planner.CaptureError, match="a result of 32x16 of a part of the forward is written to"
    ):
        planner.plan(WrittenOver(how), (x,), **_QUICK)  # type: ignore[arg-type]
    assert _trains_like_eager(WrittenOver(how), x, backend="replay")


def test_a_buffer_that_numpy_fills_again_is_not_read_again_by_replays() -> None:
    torch.manual_seed(0)
    assert _trains_like_eager(Stack("numpy", None), torch.randn(32, 16), backend="replay")
