"""Gradients of means and squares take fewer passes over memory, and have the bits of PyTorch's formulas."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

import planner
from planner._torch.fake import fake_mode
from planner.graph.joint_pass import AutocastContext, TraceContext
from planner.graph.passes.means_and_squares import simplify_means_and_squares

aten = torch.ops.aten

Function = Callable[[torch.Tensor], torch.Tensor]


class Normalised(nn.Module):
    """Layers that divide by the root of the mean square, as Llama's do."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            wide = x.float()
            root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x + layer(self.weight * (wide * root).to(x.dtype))
        return x.float().sin().sum()


class Applied(nn.Module):
    """A function of a linear layer's results."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).sin().sum()


def assert_exact(model: nn.Module, plan: planner.Plan, x: torch.Tensor) -> None:
    report = planner.verify(copy.deepcopy(model), (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("solver", ["none", "sqrt_n"])
def test_norms_divide_rows_and_copy_no_first_powers(solver: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Normalised().to(dtype).train(), torch.randn(4, 6, 24).to(dtype)
    plan = planner.plan(model, (x,), budget="1TiB" if solver == "none" else "min", solver=solver)
    divided = [op for op in plan.graphs[0].ops if op.name == "aten.div.Scalar"]
    assert len(divided) == 2  # those of the first layer lead to the input only
    assert {op.bytes for op in divided} <= {0, 4 * 6 * 4}  # 0 where it is written into an operand
    # Of the three powers of a layer the third one of the root is left, which is as small.
    powers = [op for op in plan.graphs[0].ops if op.name.startswith("aten.pow") and op.phase == "backward"]
    assert {op.bytes for op in powers} <= {0, 4 * 6 * 4}
    assert_exact(model, plan, x)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda x: x.pow(2).mean(-1, keepdim=True) + x, "a sum"),
        (lambda x: x.transpose(0, 1).pow(2).mean(0), "a product"),
        (lambda x: (x.cos() * 3).mean((0, 2)), "a product"),
        (lambda x: x.pow(2).transpose(1, 2) * x.mean(), "both"),
        (lambda x: x[:1].pow(2).mean(-1), "a product of a single row"),
        (lambda x: x.mean(-1).pow(2), "a product of what is repeated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_reads_them_gradients_are_eagers(function: Function, reads: str) -> None:
    torch.manual_seed(0)
    model, x = Applied(function).train(), torch.randn(3, 5, 6, requires_grad=True)
    assert_exact(model, planner.plan(model, (x,), budget="1TiB", solver="none"), x)


def gradient(reader: Any, copied: bool) -> GraphModule:
    """A backward in which an operator reads, beside a tensor of 4 x 8, the gradient of a mean or a power."""
    graph = FxGraph()
    rows, wide = graph.placeholder("rows"), graph.placeholder("wide")
    if copied:
        made = graph.call_function(aten.pow.Tensor_Scalar, (wide, 1.0))
    else:
        made = graph.call_function(aten.expand.default, (rows, [4, 8]))
        made = graph.call_function(aten.div.Scalar, (made, 8))
    graph.output((graph.call_function(reader, (made, wide)),))
    with fake_mode():
        rows.meta["val"], wide.meta["val"] = torch.empty(4, 1), torch.empty(4, 8)
        for node in graph.nodes:
            if node.op == "call_function":
                args = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
                node.meta |= {"val": node.target(*args), "partitioner_tag": "is_backward"}
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("reader", [aten.mul.Tensor, aten.add.Tensor, aten.maximum.default], ids=str)
def test_only_where_products_read_them(reader: Any, copied: bool) -> None:
    """A sum of gradients is one that autograd makes, in place; of other operators nothing is known."""
    module = gradient(reader, copied)
    inputs = torch.randn(4, 1), torch.randn(4, 8)
    (expected,) = module(*inputs)
    simplify_means_and_squares(module, TraceContext(module, (), AutocastContext.here()))
    module.recompile()
    assert torch.equal(module(*inputs)[0], expected)
    called = [n.target for n in module.graph.nodes if n.op == "call_function"]
    if copied:
        assert (aten.pow.Tensor_Scalar not in called) == (reader is aten.mul.Tensor)
    else:
        assert called.index(aten.div.Scalar) == (0 if reader is aten.mul.Tensor else 1)
