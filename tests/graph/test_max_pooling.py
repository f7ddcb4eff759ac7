"""Max-pooling keeps nothing of what it pooled, nor does ReLU before it: eager's bits, and less memory."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner import Plan
from planner._torch.execution.own_backwards import memory_format
from planner._torch.execution.pooling_operators import GIVEN_SIZES

aten = torch.ops.aten

POOLINGS: dict[Any, Any] = {
    aten.max_pool2d_with_indices_backward.default: lambda x: (
        aten.max_pool2d_with_indices(x, [3], [2], [1], [1], True),
        ([3], [2], [1], [1], True),
    ),
    aten.max_pool3d_with_indices_backward.default: lambda x: (
        aten.max_pool3d_with_indices(x, [2] * 3, [1] * 3, [0] * 3, [2] * 3),
        ([2] * 3, [1] * 3, [0] * 3, [2] * 3, False),
    ),
    aten.adaptive_max_pool2d_backward.default: lambda x: (aten.adaptive_max_pool2d(x, [3, 4]), ()),
    aten.adaptive_max_pool3d_backward.default: lambda x: (aten.adaptive_max_pool3d(x, [3, 4, 2]), ()),
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operator", POOLINGS, ids=str)
def test_sizes_are_enough(operator: Any, dtype: torch.dtype) -> None:
    dimensions = 3 if "3d" in str(operator) else 2
    layouts = {"rows": torch.contiguous_format, "last": LAST[dimensions]}
    for layout in layouts.values():
        values = torch.randn(2, 3, *(9, 11, 8)[:dimensions]).to(dtype).contiguous(memory_format=layout)
        (result, indices), rest = POOLINGS[operator](values)
        if memory_format(indices) is not layout:
            assert operator is aten.adaptive_max_pool3d_backward.default
            continue
        gradient = torch.randn(result.shape).to(dtype)
        expected = operator(gradient, values, *rest, indices)
        found = GIVEN_SIZES[operator](gradient, list(values.shape), *rest, indices)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


class Net(nn.Module):
    """Convolutions, each with ReLU and then pooling as in VGG, and one with pooling before ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(8, 8, 3, 1, 1), nn.MaxPool2d(2), nn.ReLU()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().sum(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().train()


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def planned(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    return planner.plan(model, (x,), **{"budget": "100%", "solver": "sqrt_n", "loss": squares, **options})


def run_backward(plan: Plan) -> list[str]:
    return [graph.ops[i].name for graph in plan.graphs for i in graph.backward]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(torch.contiguous_format, marks=pytest.mark.heavy),
        pytest.param(torch.channels_last, marks=pytest.mark.heavy),
    ],
    ids=["rows", "last"],
)
def test_nothing_that_is_pooled_is_kept(layout: torch.memory_format) -> None:
    model, x = net().to(memory_format=layout), torch.randn(4, 3, 32, 32).contiguous(memory_format=layout)
    plan = planned(model, x)
    report = planner.verify(model, (x,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    (graph,) = plan.graphs
    kept = [graph.ops[i].name for i in graph.kept]
    assert kept.count("aten.convolution.default") == 1  # batch normalisation reads it
    assert "aten.relu.default" not in kept
    # Each gradient is masked before pooling's backward; the last ReLU comes after pooling as it is.
    order = [name.split(".")[1] for name in run_backward(plan)]
    pooling, mask = "max_pool2d_with_indices_backward", "threshold_backward"
    assert [name for name in order if name in (pooling, mask)] == [mask, pooling] * 3
    assert sum(name.startswith("planner.max_pool2d") for name in run_backward(plan)) == 3


def bits(value: torch.Tensor) -> list[int]:
    return value.view(torch.int32).flatten().tolist()


def same_gradients(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> bool:
    found = []
    for each in (model, plain):
        each.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        squares(each(given)).backward()
        found.append([given.grad, *(p.grad for p in each.parameters())])
    return all(bits(a) == bits(b) for a, b in zip(*found, strict=True))


def test_no_numbers_and_other_batches() -> None:
    pooled = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 2, 1)).train()
    plain = copy.deepcopy(pooled)
    x = torch.randn(4, 3, 16, 16)
    planned(pooled, x.clone().requires_grad_()).apply(pooled)
    assert same_gradients(pooled, plain, x)
    x[0, 0, :5, :5], x[0, 1], x[1], x[2, 0, 3] = float("nan"), -0.0, -1.0, float("inf")
    assert same_gradients(pooled, plain, x)
    for batch in (3, 2):
        assert same_gradients(pooled, plain, torch.randn(batch, 3, 16, 16))


class Otherwise(nn.Module):
    """What is pooled, or masked, is not just the result of ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        read_twice = x.relu()
        pooled = [F.leaky_relu(x), read_twice, x.sin().relu() * 2, F.threshold(x, 0.5, 1.0), x.clamp(-1, 1)]
        results = [self.second(F.max_pool2d(each, 2)).sum() for each in pooled]
        return torch.stack([*results, read_twice.square().sum()])


@pytest.mark.heavy
def test_other_masks_stay_after_pooling() -> None:
    torch.manual_seed(0)
    model, x = Otherwise().train(), torch.randn(2, 3, 16, 16)
    plan = planned(model, x)
    report = planner.verify(model, (x,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    names = [name.split(".")[1] for name in run_backward(plan)]
    assert names.count("max_pool2d_with_indices_backward") == 5
    assert "max_pool2d_with_indices_backward" in names[: names.index("threshold_backward")]


class ChangedLater(nn.Module):
    """What one part pools last, the next changes in place."""

    def __init__(self, *, viewed: bool) -> None:
        super().__init__()
        self.pooled = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.mix, self.viewed = nn.Linear(8, 8), viewed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        y = y.flatten(2).transpose(1, 2) if self.viewed else y
        torch._dynamo.graph_break()
        y -= torch.full((8,), 0.5)
        return self.mix(y).square().mean()


@pytest.mark.parametrize("viewed", [False, True])
def test_results_that_are_changed_in_place_later_are_not_read(viewed: bool) -> None:
    torch.manual_seed(0)
    model, x = ChangedLater(viewed=viewed).train(), torch.randn(2, 3, 16, 16)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


def test_pooled_results_that_a_loop_changes_in_place_are_not_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).train()
    x, twin = torch.randn(2, 3, 16, 16), copy.deepcopy(model)
    planner.plan(model, (x,), loss=torch.sum, budget="100%").apply(model)
    for each in (model, twin):
        y = each(x)
        y -= torch.full((8,), 0.5)
        y.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
