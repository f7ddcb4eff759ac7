"""Outputs beside the loss: held by the training loop while backward runs, or dropped."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanWarning
from planner.planning.options import options_of
from planner.training_step.step import OutputsError, Step
from planner.verification.measure import measure_peak
from tests.zoo import Built


class Tagger(nn.Module):
    """Many words and little else: the logits are most of what a step takes. Returns its loss beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(600, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 600)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(words)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger() -> Built:
    torch.manual_seed(0)
    words = torch.randint(0, 600, (4, 32))
    return Tagger().train(), (), {"words": words, "labels": words}


LOGITS = 4 * 32 * 600 * 4


def measured(model: nn.Module, kwargs: dict[str, Any], outputs: str) -> int:
    """The dynamic peak of a step as a user writes it."""

    def held() -> object:
        output = model(**kwargs)
        output["loss"].backward()
        return output

    def dropped() -> object:
        loss = model(**kwargs)["loss"]
        loss.backward()
        return loss

    step = held if outputs == "held" else dropped
    step()
    model.zero_grad(set_to_none=True)
    peak = measure_peak(step, "cpu").peak_bytes
    model.zero_grad(set_to_none=True)
    return peak


@pytest.mark.heavy
@pytest.mark.parametrize("outputs", ["held", "dropped"])
def test_predicted_is_measured(outputs: Any) -> None:
    model, _, kwargs = tagger()
    plan = planner.plan(model, kwargs=kwargs, budget="90%", outputs=outputs, time_limit=1)
    assert plan.model.outputs == outputs
    assert measured(model, kwargs, outputs) == plan.baseline.dynamic_peak_bytes
    plan.apply(model)
    assert measured(model, kwargs, outputs) == plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_dropped_logits_are_not_counted() -> None:
    model, _, kwargs = tagger()
    held, dropped = (
        planner.plan(model, kwargs=kwargs, budget="min", outputs=outputs, time_limit=1)
        for outputs in ("held", "dropped")
    )
    assert held.baseline.dynamic_peak_bytes - dropped.baseline.dynamic_peak_bytes == LOGITS
    assert held.predicted.dynamic_peak_bytes - dropped.predicted.dynamic_peak_bytes >= LOGITS


@pytest.mark.heavy
@pytest.mark.parametrize("outputs", ["held", "dropped"])
def test_verify_does_with_outputs_what_the_plan_does(outputs: Any, tmp_path: Path) -> None:
    model, _, kwargs = tagger()
    planner.plan(model, kwargs=kwargs, budget="90%", outputs=outputs, time_limit=1).save(tmp_path / "plan")
    plan = planner.Plan.load(tmp_path / "plan")
    assert options_of(plan).outputs == outputs
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        report = planner.verify(model, kwargs=kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == report.baseline_predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_outputs_that_are_held_although_dropped_are_warned_of_once() -> None:
    model, _, kwargs = tagger()
    plan = planner.plan(model, kwargs=kwargs, budget="90%", outputs="dropped", time_limit=1)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        model(**kwargs)["loss"].backward()
    output = model(**kwargs)
    with pytest.warns(PlanWarning, match=r"outputs='dropped', but 1 outputs .* are still held .* 300.0 KiB"):
        output["loss"].backward()
    output = model(**kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        output["loss"].backward()


@pytest.mark.heavy
def test_verify_can_measure_the_other_way() -> None:
    model, _, kwargs = tagger()
    plan = planner.plan(model, kwargs=kwargs, budget="90%", outputs="held", time_limit=1)
    report = planner.verify(model, kwargs=kwargs, plan=plan, outputs="dropped", repeats=0)
    assert report.measured_dynamic_peak_bytes < report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_a_loss_outside_of_the_module_drops_what_it_does_not_save() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2000))
    x, y = torch.randn(64, 16), torch.randint(0, 2000, (64,))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    for outputs, bytes_ in (("held", 64 * 2000 * 4), ("dropped", 0)):
        plan = planner.plan(model, (x,), budget="100%", loss=loss, outputs=outputs)
        report = planner.verify(model, (x,), plan=plan, loss=loss, repeats=0)
        assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
        assert report.measured_dynamic_peak_bytes // (64 * 2000 * 4) == 3 + (bytes_ > 0)


def test_what_is_differentiated_is_held_in_any_case() -> None:
    model = nn.Linear(8, 8)
    output, loss = Step((torch.ones(2, 8),), outputs="dropped").run(model)
    assert loss is None
    assert [o.shape for o in output] == [(2, 8)]


@pytest.mark.heavy
def test_sweep_and_the_largest_batch_drop_outputs_too() -> None:
    model, _, kwargs = tagger()
    (plan,) = planner.sweep(model, kwargs=kwargs, budgets=["90%"], outputs="dropped", time_limit=1)
    assert plan.model.outputs == "dropped"

    def make_args(batch: int) -> dict[str, torch.Tensor]:
        words = torch.zeros(batch, 32, dtype=torch.long, device="meta")
        return {"words": words, "labels": words}

    found = [
        planner.max_batch(model.to("meta"), make_args, "10MiB", outputs=outputs, solver="none", most=64)
        for outputs in ("held", "dropped")
    ]
    assert found[0].batch < found[1].batch
    assert options_of(found[1].plan).outputs == "dropped"


def test_neither_held_nor_dropped() -> None:
    with pytest.raises(OutputsError, match=r"outputs='kept': expected 'held'.* or 'dropped'"):
        planner.plan(nn.Linear(2, 2), (torch.ones(1, 2),), budget="min", outputs="kept")  # type: ignore[arg-type]
