"""Hugging Face's Trainer with the plan inside trains to the same weights, within what was predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from planner.integrations.huggingface import PlannerCallback
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.side_by_side import no_plan_warnings

pytestmark = pytest.mark.heavy


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            attention_dropout=0.1,
        )
    )  # fmt: skip


def _data(count: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [(32, 24, 28, 20)[i % 4] for i in range(count)]
    words = [torch.randint(0, 64, (length,), generator=generator) for length in lengths]
    return [{"input_ids": w, "labels": w.clone(), "attention_mask": torch.ones_like(w)} for w in words]


def _padded(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence([e[name] for e in examples], True, value)
        for name, value in filled.items()
    }


class _Measured(Trainer):
    """Measures its fourth step, of the size of the first."""

    peak = steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps != 4:
            return super().training_step(*args, **kwargs)
        losses: list[torch.Tensor] = []
        step = super().training_step
        self.peak = measure_peak(lambda: losses.append(step(*args, **kwargs)), "cpu").peak_bytes
        self.plan = installed_plan(self.model)
        return losses[0]


def _train(folder: Path, *, planned: bool, resume: bool = False, **options: Any) -> _Measured:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3,
        learning_rate=1e-2, max_grad_norm=0.5, **options,
    )  # fmt: skip
    callbacks = [PlannerCallback(budget="60%", solver="sqrt_n")] if planned else []
    trainer = _Measured(
        _model(), arguments, train_dataset=_data(), eval_dataset=_data(4), data_collator=_padded,
        callbacks=callbacks,
    )  # fmt: skip
    with no_plan_warnings():
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


@pytest.mark.parametrize(
    ("options", "resumes"),
    [({"bf16": True, "gradient_accumulation_steps": 2}, True), ({"gradient_checkpointing": True}, False)],
    ids=["bfloat16, accumulating", "its own checkpointing on"],
)
def test_it_trains_to_the_same_weights(
    options: dict[str, Any], resumes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = _train(tmp_path / "planned", planned=True, **options)
    assert "planner: LlamaForCausalLM planned for 60% in " in capsys.readouterr().err
    assert trainer.plan is not None
    assert trainer.peak == pytest.approx(trainer.plan.predicted.dynamic_peak_bytes, rel=0.005)
    assert installed_plan(trainer.model) is None
    theirs = _train(tmp_path / "unplanned", planned=False, **options).model.state_dict()
    states = [trainer.model.state_dict()]
    if resumes:
        states.append(_train(tmp_path / "planned", planned=True, resume=True, **options).model.state_dict())
    for ours in states:
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
