"""Gradients of means and squares take fewer passes over memory, and have the bits of PyTorch's formulas."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner

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


def operators(plan: planner.Plan) -> Counter[str]:
    return Counter(op.name for op in plan.graphs[0].ops if op.phase == "backward")


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


def test_a_sum_is_as_autograd_adds_it_up() -> None:
    """Its operands are divided after they are repeated: only products read a result that is not."""
    torch.manual_seed(0)
    model, x = Applied(lambda x: x.mean(-1, keepdim=True) + x).train(), torch.randn(3, 5, 6)
    plan = planner.plan(model, (x,), budget="1TiB", solver="none")
    assert [op.bytes for op in plan.graphs[0].ops if op.name == "aten.div.Scalar"] != [3 * 5 * 4]
    assert operators(plan)["aten.div.Scalar"] == 1
    assert_exact(model, plan, x)
