"""Operators whose results are as large as data decide: what they take follows from what they find."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from planner.costs.workspace import WorkspaceMeter
from planner.training_step.call import Call, sizes_by_data
from planner.verification.measure import measure_peak
from tests.side_by_side import AfterALayer, exact_plan_of

pytestmark = pytest.mark.heavy

aten = torch.ops.aten
X = torch.linspace(-3, 3, 4000).sin().view(500, 8)
ROWS, ELEMENTS = X[:, 0] < 0.3, X > 0.3
NUMBERS = torch.arange(500) % 37
LENGTHS = torch.tensor([10] * 20 + [3] * 30)
COUNT = int(ROWS[:256].sum())

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "elements": (aten.index.Tensor, (X, [ELEMENTS])),
    "rows": (aten.index.Tensor, (X, [ROWS])),
    "columns": (aten.index.Tensor, (X.view(2, 250, 8), [None, None, ELEMENTS[120:290:22, 0]])),
    "a mask of bytes": (aten.index.Tensor, (X, [ROWS.byte()])),
    "a mask and a number": (aten.index.Tensor, (X, [ROWS, torch.tensor([3])])),
    "a mask and numbers apart": (aten.index.Tensor, (X.view(500, 4, 2), [ROWS, None, torch.tensor([1])])),
    "selected": (aten.masked_select.default, (X, ELEMENTS)),
    "nothing selected": (aten.masked_select.default, (X, X > 5)),
    "selected by rows": (aten.masked_select.default, (X, ROWS[:, None])),
    "selected by expanded rows": (aten.masked_select.default, (X, ROWS[:, None].expand(500, 8))),
    "selected of others": (aten.masked_select.default, (X.t(), ELEMENTS.t())),
    "where a mask is": (aten.nonzero.default, (ELEMENTS,)),
    "where numbers are": (aten.nonzero.default, (X * ELEMENTS,)),
    "distinct": (aten._unique2.default, (NUMBERS,)),
    "distinct bytes": (aten._unique2.default, (NUMBERS.byte(), True, True, True)),
    "distinct halves": (aten._unique2.default, (torch.arange(4000).half(), True, True)),
    "distinct rows": (aten.unique_dim.default, (NUMBERS.view(50, 10) % 5, 0, True, True, True)),
    "distinct neighbours": (aten.unique_consecutive.default, (NUMBERS // 5, True, True)),
    "repeated": (aten.repeat_interleave.Tensor, (NUMBERS,)),
    "packed": (aten._pack_padded_sequence.default, (X.view(50, 10, 8).transpose(0, 1), LENGTHS, False)),
    "counted": (aten.bincount.default, (NUMBERS, X[:, 0])),
    "written at a mask": (aten.index_put.default, (X, [ELEMENTS], X[ELEMENTS], True)),
    "written at a mask of bytes": (aten.index_put.default, (X, [ROWS.byte()], X[ROWS], True)),
    "gradient of what was written": (
        aten.masked_scatter_backward.default,
        (X[:1].expand(500, 8), ELEMENTS, [int(ELEMENTS.sum())]),
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_what_is_measured_is_what_the_call_takes(name: str) -> None:
    operator, given = CALLS[name]
    result = operator(*given)
    real = measure_peak(lambda: operator(*given), "cpu").peak_bytes
    without_data = tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), given
    )
    meter = WorkspaceMeter("cpu", None)
    call = Call(operator, without_data, {}, sizes_by_data(operator, given, result))
    (memory,) = meter.measure([call])
    assert not meter.failures
    assert memory.workspace_bytes + sum(memory.output_bytes) == real


FOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a few selected": lambda y: torch.masked_select(y, y > 1),
    "none selected": lambda y: torch.masked_select(y, y > 100),
    "a few twice": lambda y: torch.masked_select(y, y > 1).sum() + torch.masked_select(y, y > 2).sum(),
    "all selected": lambda y: torch.masked_select(y, y > -100),
    "a few by a mask": lambda y: y[y > 1],
    "rows by a mask": lambda y: y[y[:, 0] > 0.5],
    "neighbours that differ": lambda y: y[torch.unique_consecutive((y[:, 0] * 8).long()) % 16],
    "different rows": lambda y: y[torch.unique((y[:, :2] * 4).long(), dim=0)[:, 0] % 16],
    "rows by their numbers": lambda y: y[torch.unique((y[:, 0] * 8).long(), return_inverse=True)[1] % 16],
    "rows several times": lambda y: y.repeat_interleave((y[:, 0].abs() * 4).long(), 0),
    "scattered": lambda y: y.clone().masked_scatter(ROWS[:256, None].expand(256, 64), y[:COUNT]),
}


def test_sequences_that_are_packed_take_no_more_than_predicted() -> None:
    """What lies together already is not copied: of the longest sequence the last steps."""
    given = (X.view(50, 10, 8).transpose(0, 1), torch.tensor([10] + [6] * 20 + [3] * 29), False)
    operator = aten._pack_padded_sequence.default
    result = operator(*given)
    real = measure_peak(lambda: operator(*given), "cpu").peak_bytes
    meter = WorkspaceMeter("cpu", None)
    (memory,) = meter.measure([Call(operator, given, {}, sizes_by_data(operator, given, result))])
    assert real < memory.workspace_bytes + sum(memory.output_bytes) <= real + 4 * X[0].nbytes


@pytest.mark.parametrize("name", list(FOUND))
def test_steps_that_find_elements_take_what_is_predicted(name: str) -> None:
    torch.manual_seed(0)
    model, x = AfterALayer(FOUND[name]), torch.randn(256, 64)
    exact_plan_of(model, (x,), budget="120%", solver="auto")
