"""Tensors that are conjugated or negated when they are read: kernels that do not know of this copy them."""

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.costs.workspace import WorkspaceMeter
from planner.training_step.call import Call

aten = torch.ops.aten


@pytest.mark.parametrize("lazy", [False, True])
def test_a_product_with_a_conjugate_is_measured_with_the_copy_of_it(lazy: bool) -> None:
    left = torch.empty(4, 10, 10, dtype=torch.complex64, device="meta")
    right = left.conj() if lazy else left
    meter = WorkspaceMeter("cpu", None)
    memory = meter.measure([Call(aten.bmm.default, (left, other)) for other in (left, right)])
    assert [m.workspace_bytes for m in memory] == [0, 4 * 10 * 10 * 8 if lazy else 0]


def test_a_negated_part_is_measured_with_the_copy_of_it() -> None:
    negated = torch.empty(10, 10, dtype=torch.complex64, device="meta").conj().imag
    assert negated.is_neg()
    meter = WorkspaceMeter("cpu", None)
    (memory,) = meter.measure([Call(aten.mm.default, (negated, torch.empty(10, 3, device="meta")))])
    assert memory.workspace_bytes == 10 * 10 * 4


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return torch.fft.fft(torch.bmm(scaled, scaled)).conj() @ scaled


def test_a_complex_step_peaks_as_predicted() -> None:
    model, inputs = Squared(), (torch.randn(4, 10, 10, dtype=torch.complex64),)
    plan = planner.plan(model, inputs, budget="min", loss=_power)
    report = planner.verify(model, inputs, plan=plan, loss=_power, repeats=0)
    assert report.ok
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


def _power(output: Tensor) -> Tensor:
    return (output.abs() ** 2).sum()
