"""Backwards of batch normalisation in training take no running statistics: eager's bits, and none is held."""

from typing import Any

import pytest
import torch
import torch.nn as nn

import planner

pytestmark = pytest.mark.heavy

backward = torch.ops.aten.native_batch_norm_backward.default


@pytest.mark.parametrize("mask", [(True,) * 3, (True, False, False), (False, True, True)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", ["rows", "last"])
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        *((dtype, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *((dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_the_kernel_does_not_look_at_them(
    dtype: torch.dtype, parameters: torch.dtype, layout: str, weighted: bool, mask: tuple[bool, ...]
) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if layout == "last" else torch.contiguous_format
    image, gradient = (torch.randn(3, 5, 4, 6).to(dtype).contiguous(memory_format=form) for _ in range(2))
    weight, bias, mean, variance = (torch.rand(5).to(parameters) + 0.5 for _ in range(4))
    scale, shift = (weight, bias) if weighted else (None, None)
    _, *saved = torch.native_batch_norm(image, scale, shift, mean, variance, True, 0.1, 1e-5)
    mask = tuple(wanted and (weighted or not i) for i, wanted in enumerate(mask))
    expected = backward(gradient, image, scale, mean, variance, *saved, True, 1e-5, mask)
    found = backward(gradient, image, scale, None, None, *saved, True, 1e-5, mask)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


class Block(nn.Module):
    """A narrow image of many channels, so that statistics are as large as what is normalised."""

    def __init__(self, normalisation: nn.Module, form: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.act = form, normalisation, nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.inner(x)))


NORMALISATIONS: dict[str, Any] = {
    "plain": nn.BatchNorm1d,
    "averaged": lambda n: nn.BatchNorm1d(n, momentum=None),
    "without weights": lambda n: nn.BatchNorm1d(n, affine=False),
    "without running statistics": lambda n: nn.BatchNorm1d(n, track_running_stats=False),
    "shared": None,
    "by running statistics": lambda n: nn.BatchNorm1d(n).eval(),
}


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_steps_are_equal_and_hold_none(kind: str, budget: str) -> None:
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(256)
    make = NORMALISATIONS[kind] or (lambda _: shared)
    model = nn.Sequential(*(Block(make(256), nn.Linear(256, 256)) for _ in range(4)))
    x = torch.randn(4, 256)
    plan = planner.plan(model, (x,), budget=budget, loss=squares)
    report = planner.verify(model, (x,), loss=squares, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


def test_a_plan_by_regions_takes_what_the_step_without_one_takes() -> None:
    model = nn.Sequential(*(Block(nn.BatchNorm1d(512), nn.Tanh()) for _ in range(4)))
    names = [name for name, _ in model.named_children()]
    plan = planner.plan(
        model, (torch.randn(4, 512),), budget="1GiB", solver="none", regions=names, loss=squares
    )
    assert len(plan.model.regions) == len(names)
    assert plan.predicted.peak_bytes == plan.baseline.peak_bytes
