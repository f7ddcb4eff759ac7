"""Where prediction and measurement could differ by a few bytes, and do not."""

import operator

import torch
import torch.nn as nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from planner.lowering.codegen import generate
from planner.lowering.partition import RUN_TOGETHER
from tests.side_by_side import exact_plan_of

aten = torch.ops.aten


class Divided(nn.Module):
    """A product that is divided by a number, for which PyTorch allocates 12 bytes, and bent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x.sin() @ (y * self.weight).cos()) / 3.0).tanh().sum()


def test_what_is_read_stays_until_all_that_runs_together_is_done() -> None:
    """The peak is where the product runs again: its operands, the product, and 20 bytes, 12 of them while it
    is divided, in its place."""
    torch.manual_seed(0)
    args = torch.randn(40, 40), torch.randn(40, 32)
    plan = exact_plan_of(Divided(), args, solver="auto", outputs="dropped", recompute=["aten.mm", "aten.sin"])
    assert plan.predicted.dynamic_peak_bytes == (40 * 40 + 40 * 32 + 40 * 32) * 4 + 8 + 12


class Curved(nn.Module):
    """Second derivatives in the forward, which PyTorch begins with zeros that take nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return (h @ torch.func.hessian(lambda row: (row.sin() * row).sum())(h[0])).tanh().sum()


def test_zeros_that_are_known_to_be_zeros_take_nothing() -> None:
    torch.manual_seed(0)
    plan = exact_plan_of(Curved(), (torch.randn(8, 8),))
    assert plan.baseline.dynamic_peak_bytes == 2504


class Shaped(nn.Module):
    """Finds a size on the meta device, in memory that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = torch.empty(64, 64, device="meta")
        return (self.layer(x) / (there @ there.t()).shape[0]).tanh().sum()


def test_what_is_on_the_meta_device_takes_nothing() -> None:
    torch.manual_seed(0)
    plan = exact_plan_of(Shaped(), (torch.randn(8, 8),))
    assert plan.baseline.dynamic_peak_bytes == 8 * 8 * 4 * 2 + 8 * 4 + 8


def test_results_that_nobody_reads_stay_until_all_that_runs_together_is_done() -> None:
    graph = FxGraph()
    x, y = (graph.placeholder(name) for name in ("x", "y"))
    moments = graph.call_function(aten.var_mean.correction, (x,))
    variance = graph.call_function(operator.getitem, (moments, 0))
    variance.meta["val"] = torch.empty(())
    moments.meta = {"val": [torch.empty(()), torch.empty(())], RUN_TOGETHER: 1}
    divided = graph.call_function(aten.div.Tensor, (variance, y))
    divided.meta[RUN_TOGETHER] = 1
    graph.output([divided])
    text, _ = generate(graph, GraphModule(nn.Module(), graph), "program")
    assert [line.split(" = ")[0].strip() for line in text.splitlines()[3:]] == [
        "v3, v2_1,",
        "v4",
        "del v2_1, v0, v3, v1",
        "return [v4]",
    ]
