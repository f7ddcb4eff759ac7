"""Who trains with checkpoints of the model's own, and adds the callback, gets a share of that step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from planner.errors import InfeasibleBudget
from planner.integrations.huggingface import PlannerCallback
from planner.planfile.plan import PlanRecord
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.small_language_model import padded, sentences, small_language_model

pytestmark = [pytest.mark.heavy, pytest.mark.timed]


def _model() -> Any:
    """With as many layers as pay."""
    model = small_language_model()
    model.blocks.extend(type(model.blocks[0])() for _ in range(8))
    return model


class _Measured(Trainer):
    """Measures its third step; all are of one size."""

    peak = steps = 0
    plan: PlanRecord | None = None

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps != 3:
            return super().training_step(model, *args, **kwargs)
        losses: list[torch.Tensor] = []
        step = super().training_step
        self.peak = measure_peak(lambda: losses.append(step(model, *args, **kwargs)), "cpu").peak_bytes
        self.plan = installed_plan(self.model)
        return losses[0]


def _train(folder: Path, callbacks: list[Any], *, checkpointing: bool) -> _Measured:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=16, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=checkpointing,
    )  # fmt: skip
    one = sentences(1)[0]
    trainer = _Measured(
        _model(), arguments, train_dataset=[one] * 64, data_collator=padded, callbacks=callbacks
    )
    trainer.train()
    return trainer


def test_a_share_is_of_the_step_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = _train(tmp_path, [], checkpointing=False).peak
    own = _train(tmp_path, [], checkpointing=True).peak
    assert own < 0.9 * plain
    cache = tmp_path / "plan.json"
    trainer = _train(tmp_path, [PlannerCallback("100%", solver="sqrt_n", cache=cache)], checkpointing=True)
    assert "percentages are shares of the step with it" in capsys.readouterr().err
    plan = trainer.plan
    assert plan is not None
    assert plan.target.budget_bytes is not None
    assert trainer.peak <= own * 1.005
    assert plan.target.budget_bytes - plan.resident.total == pytest.approx(own, rel=0.005)
    assert plan.baseline.dynamic_peak_bytes == pytest.approx(plain, rel=0.005)
    again = _train(tmp_path, [PlannerCallback("100%", solver="sqrt_n", cache=cache)], checkpointing=True)
    assert "trains by" in capsys.readouterr().err
    assert again.plan == plan
    without = _train(tmp_path, [PlannerCallback("100%", solver="sqrt_n", cache=cache)], checkpointing=False)
    assert "the model's own checkpoints were on, now off" in capsys.readouterr().err
    assert without.plan is not None
    assert without.plan.target.budget_bytes > plan.target.budget_bytes


def test_one_that_nothing_reaches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleBudget, match="budget 10% is"):
        _train(tmp_path, [PlannerCallback("10%", solver="sqrt_n")], checkpointing=True)
