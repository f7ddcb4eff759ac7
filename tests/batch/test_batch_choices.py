"""What `max_batch` offers beside its answer: no plan, the fastest, the largest at several extra times."""

import inspect
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import planner
from planner.batch.points import BatchChoice, MaxBatch, named
from planner.report.batches import render_batches


class Net(nn.Module):
    """Some layers whose results are cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def found() -> MaxBatch:
    return planner.max_batch(Net(), lambda batch: (torch.empty(batch, 64),), "1MiB", solver="sqrt_n")


@pytest.mark.heavy
def test_the_answer_takes_at_most_a_third_more_time(found: MaxBatch) -> None:
    assert inspect.signature(planner.max_batch).parameters["max_overhead"].default == 0.33
    assert found.largest.overhead <= 0.33
    assert found.largest.batch == found.batch


@pytest.mark.heavy
def test_the_choices_run_from_no_plan_to_any_price(found: MaxBatch) -> None:
    names = [choice.name for choice in found.choices]
    assert names == ["no plan", "fastest", "largest at +15%", "largest at +33%", "largest at any price"]
    unplanned, _, *largest = [choice.point for choice in found.choices]
    assert unplanned == found.unplanned
    assert not unplanned.planned
    batches = [point.batch for point in largest]
    assert batches == sorted(batches)
    assert unplanned.batch <= batches[0]
    for choice in found.choices[2:4]:
        assert choice.max_overhead is not None
        assert choice.point.overhead <= choice.max_overhead
    assert found.largest in largest
    assert all(point.total_bytes <= 2**20 for point in largest)


@pytest.mark.heavy
def test_the_fastest_is_not_slower_than_no_plan(found: MaxBatch) -> None:
    assert found.unplanned is not None
    others = [*found.points, *(choice.point for choice in found.choices)]
    assert found.fastest.samples_per_second == max(p.samples_per_second for p in others)
    assert found.fastest.samples_per_second >= found.unplanned.samples_per_second
    assert found.to_dict()["choices"][0]["point"]["batch"] == found.unplanned.batch


@pytest.mark.parametrize("width", [60, 100])
def test_the_table_names_every_choice_once_and_marks_the_plan(found: MaxBatch, width: int) -> None:
    assert found.unplanned is not None
    same = [replace(choice, point=found.unplanned) for choice in found.choices[:2]]
    shown = replace(found, choices=[*same, *found.choices[2:], BatchChoice(named(0.5), found.largest, 0.5)])
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(render_batches(shown, width=width))
    text = out.getvalue()
    assert "no plan, fastest" in text
    assert text.count("(planned)") == 1
    assert text.count("largest at +33% and +50%") == 1
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert ("samples/s" in text) == (width == 100)


@pytest.mark.parametrize("share", [-0.1, float("nan")])
def test_a_negative_price_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"max_overhead=.* expected a share"):
        planner.max_batch(Net(), lambda batch: (torch.empty(batch, 64),), "1MiB", max_overhead=share)
