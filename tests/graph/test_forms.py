"""Average pooling and padding keep nothing of what they read but its form: eager's bits, and less memory."""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner._torch.execution.form_operators import FORM_OF, GIVEN_FORMS

aten = torch.ops.aten


def forward_of(operator: Any, values: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
    name = str(operator).split(".")[1].removesuffix("_backward")
    if name == "avg_pool2d":
        rest: tuple[Any, ...] = ([3, 2], [2, 2], [1, 1], True, False, None)
    else:
        rest = ([2, 1] * int(name[-2]),)
    return getattr(aten, name)(values, *rest), rest


@pytest.mark.parametrize("operator", GIVEN_FORMS, ids=str)
def test_forms_are_enough(operator: Any) -> None:
    dimensions = int(str(operator).split("d_")[0][-1])
    for dtype in (torch.float32, torch.float64):
        values = torch.randn(4, 3, *(9, 11, 8)[:dimensions], dtype=dtype)
        moved = (0, *range(2, dimensions + 2), 1)
        last = values.permute(moved).contiguous().permute(0, dimensions + 1, *range(1, dimensions + 1))
        for each in (values, last, values[::2], last[::2], values[..., ::2], values[0]):
            result, rest = forward_of(operator, each)
            gradient = torch.randn(result.shape, dtype=dtype)
            expected = operator(gradient, each, *rest)
            form = FORM_OF(each)
            assert form.untyped_storage().nbytes() == 0
            found = GIVEN_FORMS[operator](gradient, form, *rest)
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


class Block(nn.Module):
    """A residual block as in image translation: padding that mirrors the image before each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(F.pad(x, (1, 1, 1, 1), "reflect")).relu()
        return x + self.second(F.pad(y, (1, 1, 1, 1), "replicate"))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.AvgPool2d(2)).train()


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.heavy
@pytest.mark.parametrize("layout", ["rows", pytest.param("last", marks=pytest.mark.heavy)])
def test_nothing_that_is_padded_or_pooled_is_kept(layout: str) -> None:
    model, x = blocks(), torch.randn(4, 8, 24, 24)
    if layout == "last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    plan = planner.plan(model, (x,), budget="100%", solver="sqrt_n", loss=squares)
    report = planner.verify(model, (x,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    (graph,) = plan.graphs
    kept = [graph.ops[i].name for i in graph.kept]
    assert "aten.add.Tensor" not in kept
    assert kept.count("planner.form_of.default") == 6  # of the first padding nobody wants the gradient
    if layout == "last":
        return
    plain = blocks()
    plan.apply(model)
    for batch in (4, 3):
        x, found = torch.randn(batch, 8, 24, 24), []
        for each in (model, plain):
            each.zero_grad(set_to_none=True)
            squares(each(x)).backward()
            found.append([p.grad for p in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
