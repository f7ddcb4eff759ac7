"""Functional forms of writes into views allocate as much as what the view is a part of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.costs.workspace import WorkspaceMeter
from planner.training_step.call import Call
from planner.verification.measure import measure_peak

aten = torch.ops.aten
WRITES: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "copy": (aten.copy.default, lambda: (torch.ones(3, 4),)),
    "slice": (aten.slice_scatter.default, lambda: (torch.ones(1, 4), 0, 0, 1)),
    "select": (aten.select_scatter.default, lambda: (torch.ones(4), 0, 0)),
    "diagonal": (aten.diagonal_scatter.default, lambda: (torch.ones(3),)),
    "as_strided": (aten.as_strided_scatter.default, lambda: (torch.ones(2), [2], [1], 14)),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_a_part_is_a_copy_of_the_whole(name: str) -> None:
    write, rest = WRITES[name]
    part, written = torch.zeros(8, 6)[2:5, 1:5], rest()
    real = measure_peak(lambda: write(part, *written), "cpu")
    with FakeTensorMode():
        parts = [torch.zeros(rows, 6)[2:5, 1:5] for rows in (8, 20)]
    # What is known of the part of one storage does not stand for the part of another.
    calls = [Call(write, (part, *map(_bare, written))) for part in parts]
    meter = WorkspaceMeter("cpu", None)
    smaller, larger = meter.measure(calls)
    assert sum(smaller.output_bytes) == real.final_bytes == 8 * 6 * 4
    assert sum(larger.output_bytes) == 20 * 6 * 4


def _bare(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def test_a_part_of_more_than_there_is_is_not_run() -> None:
    with FakeTensorMode():
        part = torch.zeros(2**40, 6)[:1]
    call = Call(aten.copy.default, (part, torch.empty(1, 6, device="meta")))
    meter = WorkspaceMeter("cpu", None)
    meter.measure([call])
    ((_, reason),) = meter.failed([call])
    assert "not run: it needs about" in reason
