"""Hugging Face's Trainer with the plan inside trains to the same weights, within what was predicted."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from planner._torch import modules
from planner.errors import CaptureError, PlanWarning
from planner.integrations import huggingface
from planner.integrations.huggingface import PlannerCallback
from planner.lazy import first_call
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.side_by_side import no_plan_warnings
from tests.small_language_model import SmallLanguageModel, padded, sentences, small_language_model

pytestmark = [pytest.mark.heavy, pytest.mark.timed]


class _Measured(Trainer):
    """Measures its fourth step, of the size of the first."""

    peak = steps = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths = {*getattr(self, "lengths", ()), inputs["input_ids"].shape[1]}
        self.steps += 1
        if self.steps != 4:
            return super().training_step(model, inputs, *args, **kwargs)
        losses: list[torch.Tensor] = []
        step = super().training_step
        self.peak = measure_peak(
            lambda: losses.append(step(model, inputs, *args, **kwargs)), "cpu"
        ).peak_bytes
        self.plan = installed_plan(self.model)
        return losses[0]


def _train(folder: Path, *, planned: bool, resume: bool = False, **options: Any) -> _Measured:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3,
        learning_rate=1e-2, max_grad_norm=0.5, gradient_accumulation_steps=2, **options,
    )  # fmt: skip
    # One plans again for what is longer, the other for the longest at once, and resumes with its plan.
    longest = {"max_length": 32, "cache": folder / "plan.json"} if "bf16" in options else {}
    callbacks = [PlannerCallback(budget="min", solver="sqrt_n", **longest)] if planned else []
    trainer = _Measured(
        small_language_model(), arguments, train_dataset=sentences(), eval_dataset=sentences(4),
        data_collator=padded, callbacks=callbacks,
    )  # fmt: skip
    with no_plan_warnings():
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": True}, {"bf16": True}],
    ids=["float32, its own checkpointing on", "bfloat16"],
)
def test_it_trains_to_the_same_weights(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = _train(tmp_path / "planned", planned=True, **options)
    told = capsys.readouterr().err
    assert "planner: SmallLanguageModel planned for min in " in told
    assert ("gradient checkpointing is switched off" in told) is ("gradient_checkpointing" in options)
    assert len(trainer.lengths) > 1
    assert trainer.plan is not None
    assert trainer.plan.recomputed_operations
    assert trainer.peak == pytest.approx(trainer.plan.predicted.dynamic_peak_bytes, rel=0.005)
    assert installed_plan(trainer.model) is None
    theirs = _train(tmp_path / "unplanned", planned=False, **options).model.state_dict()
    resumed = _train(tmp_path / "planned", planned=True, resume=True, **options)
    assert resumed.steps == 6
    for ours in (trainer.model.state_dict(), resumed.model.state_dict()):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class _Tuples(SmallLanguageModel):
    """Returns the loss and the logits without names."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, labels, **kwargs)
        return output.loss, output.logits


class _OfLogits(_Measured):
    """Weighs the words in a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = model(**inputs).logits
        return functional.cross_entropy(
            logits.flatten(0, 1), inputs["labels"].flatten(), torch.arange(64.0), ignore_index=-100
        )


@pytest.mark.parametrize(
    ("kind", "trained_by", "options", "outside"),
    [
        (_Tuples, _Measured, {}, 0.005),
        (SmallLanguageModel, _OfLogits, {"loss": lambda output: output.logits.sum()}, 0.1),
    ],
    ids=["the first of a tuple", "of the logits"],
)
def test_the_loss_that_the_trainer_takes_is_planned(
    kind: type[SmallLanguageModel],
    trained_by: type[_Measured],
    options: dict[str, Any],
    outside: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = trained_by(
        kind(small_language_model().config), arguments, train_dataset=sentences(), data_collator=padded,
        callbacks=[PlannerCallback(budget="min", solver="sqrt_n", costs="roofline", **options)],
    )  # fmt: skip
    with no_plan_warnings():
        trainer.train()
    assert "computed outside" not in capsys.readouterr().err
    assert trainer.plan is not None
    assert trainer.peak == pytest.approx(trainer.plan.predicted.dynamic_peak_bytes, rel=outside)


class _ForLabels(SmallLanguageModel):
    """Leaves the loss to the trainer where it gets no labels."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any = None, **kwargs: Any
    ) -> Any:
        if labels is not None:
            return super().forward(input_ids, attention_mask, labels, **kwargs)
        return CausalLMOutput(logits=super().forward(input_ids, attention_mask, input_ids).logits)


def _four_steps(kind: type[TrainingArguments], folder: Path, **more: Any) -> TrainingArguments:
    return kind(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", **more,
    )  # fmt: skip


class _WithoutLabels(_Measured):
    """Computes the loss, of which the model knows nothing."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        return functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())


def test_a_loss_of_which_the_model_knows_nothing_is_asked_for(tmp_path: Path) -> None:
    trainer = _WithoutLabels(
        _ForLabels(small_language_model().config), _four_steps(TrainingArguments, tmp_path),
        train_dataset=sentences(), data_collator=padded,
        callbacks=[PlannerCallback(budget="min", solver="sqrt_n")],
    )  # fmt: skip
    with pytest.warns(PlanWarning, match=r"a CausalLMOutput, has no loss.*PlannerCallback\(loss="):
        trainer.train()


def test_the_loss_of_smoothed_labels_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(callbacks: list[Any]) -> _Measured:
        torch.manual_seed(0)
        arguments = _four_steps(TrainingArguments, tmp_path, label_smoothing_factor=0.1)
        trainer = _Measured(
            _ForLabels(small_language_model().config), arguments, train_dataset=sentences(),
            data_collator=padded, callbacks=callbacks,
        )  # fmt: skip
        with no_plan_warnings():
            trainer.train()
        return trainer

    ours = train([PlannerCallback(budget="min", solver="sqrt_n")])
    assert "computed outside" not in capsys.readouterr().err
    assert ours.peak == pytest.approx(ours.plan.predicted.dynamic_peak_bytes, rel=0.005)
    theirs = train([]).model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.model.state_dict().items())


def test_smoothed_labels_of_a_transformers_that_does_not_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 4 passes its smoother no number of labels."""
    newer = LabelSmoother.__call__

    def older(self: Any, model_output: Any, labels: Any, shift_labels: bool = False) -> Any:
        return newer(self, model_output, labels, shift_labels)

    monkeypatch.setattr(LabelSmoother, "__call__", older)
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = huggingface._SmoothedLoss(0.1, shifts=True, counted=True)({"logits": logits})
    labels = torch.zeros(2, 5, dtype=torch.long)
    assert torch.equal(loss, LabelSmoother(0.1)({"logits": logits}, labels, True))


def test_compilation_that_the_trainer_is_asked_for_is_warned_of(tmp_path: Path) -> None:
    arguments = _four_steps(TrainingArguments, tmp_path, torch_compile=True, torch_compile_backend="eager")
    trainer = _Measured(
        small_language_model(), arguments, train_dataset=sentences(), data_collator=padded,
        callbacks=[PlannerCallback(budget="min", solver="sqrt_n", costs="roofline")],
    )  # fmt: skip
    with pytest.warns(PlanWarning, match="torch_compile=True does not reach the planned model"):
        trainer.train()
    assert trainer.plan is not None


def _began(folder: Path, callback: PlannerCallback, **more: Any) -> SmallLanguageModel:
    """A model with checkpoints of its own whose training has begun."""
    model = small_language_model().train()
    model.gradient_checkpointing_enable()
    callback.on_train_begin(_four_steps(TrainingArguments, folder, **more), None, None, model=model)
    return model


def test_its_own_checkpoints_stay_on_where_plans_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANNER", "0")
    with no_plan_warnings():
        model = _began(tmp_path, PlannerCallback("60%"), torch_compile=True)
    assert model.is_gradient_checkpointing
    assert "switched off" not in capsys.readouterr().err


def test_its_own_checkpoints_come_back_where_it_cannot_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise CaptureError("it is too strange")

    monkeypatch.setattr(first_call, "planned_or_cached", refused)
    model = _began(tmp_path, PlannerCallback("60%"))
    assert not model.is_gradient_checkpointing
    with pytest.warns(PlanWarning, match="cannot be planned"):
        model(**padded(sentences(2))).loss.backward()
    assert model.is_gradient_checkpointing


def test_its_own_checkpoints_come_back_when_training_ends(tmp_path: Path) -> None:
    callback = PlannerCallback("60%")
    model = _began(tmp_path, callback)
    assert not model.is_gradient_checkpointing
    # An error ended that training: the next one begins with the model's own, as the first did.
    arguments = _four_steps(TrainingArguments, tmp_path)
    callback.on_train_begin(arguments, None, None, model=model)
    assert not model.is_gradient_checkpointing
    callback.on_train_end(None, None, None, model=model)
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("backend", ["auto", "replay", "graph", "inductor"])
def test_what_does_not_compile_is_said_for_every_backend(backend: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        _began(tmp_path, PlannerCallback("60%", backend=backend), torch_compile=True)
    said = [w for w in caught if "torch_compile=True does not reach" in str(w.message)]
    assert len(said) == (backend != "inductor")


class _ForTokens(SmallLanguageModel):
    """Returns the logarithms of the words' probabilities besides the loss, as models do in TRL's trainers."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, labels, **kwargs)
        words = input_ids[:, 1:, None]
        output.log_probs = output.logits[:, :-1].log_softmax(-1).gather(2, words).squeeze(2)
        output.logits = None
        return output


class _OfTokens(_Measured):
    """Computes its loss of them, and leaves the model's alone."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        log_probs = model(**inputs).log_probs
        loss: torch.Tensor = (-log_probs).sum() / log_probs.numel()
        return loss


class _ArgumentsOfTRL(TrainingArguments):
    __module__ = "trl.trainer.sft_config"


def test_the_loss_of_tokens_of_trl_is_planned(tmp_path: Path) -> None:
    def train(callbacks: list[Any]) -> _OfTokens:
        torch.manual_seed(0)
        arguments = _four_steps(_ArgumentsOfTRL, tmp_path)
        trainer = _OfTokens(
            _ForTokens(small_language_model().config), arguments, train_dataset=sentences(),
            data_collator=padded, callbacks=callbacks,
        )  # fmt: skip
        with no_plan_warnings():
            trainer.train()
        return trainer

    ours = train([PlannerCallback(budget="min", solver="sqrt_n")])
    assert ours.plan is not None
    assert ours.plan.recomputed_operations
    assert ours.peak == pytest.approx(ours.plan.predicted.dynamic_peak_bytes, rel=0.005)
    theirs = train([]).model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.model.state_dict().items())


class _ArgumentsOfSentenceTransformers(TrainingArguments):
    __module__ = "sentence_transformers.sentence_transformer.training_args"


def test_a_plan_of_the_model_under_a_loss_that_calls_it_often_is_warned_of(tmp_path: Path) -> None:
    arguments, model = _four_steps(_ArgumentsOfSentenceTransformers, tmp_path), small_language_model()
    of_model = PlannerCallback("60%")
    with pytest.warns(PlanWarning, match=r"PlannerCallback\(module=loss\)"):
        of_model.on_train_begin(arguments, None, None, model=model)
    of_model.on_train_end(arguments, None, None, model=model)
    loss = torch.nn.Sequential(model)
    model.gradient_checkpointing_enable()
    callback = PlannerCallback("60%", module=loss)
    with no_plan_warnings():
        callback.on_train_begin(arguments, None, None, model=model)
    assert modules.installed_call(loss) is not None
    assert not model.is_gradient_checkpointing
    callback.on_train_end(arguments, None, None, model=model)
    assert modules.installed_call(loss) is None
    with pytest.raises(TypeError, match=r"module is a str: expected the torch\.nn\.Module"):
        PlannerCallback("60%", module="loss")  # type: ignore[arg-type]
