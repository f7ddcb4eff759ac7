"""Lightning's Trainer with the plan inside trains to the same weights, within what was predicted."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader

from planner.errors import PlannerError
from planner.integrations.lightning import PlannerCallback
from planner.lazy.step import PlannedStep
from planner.runtime.install import installed_plan
from planner.user_plan import Plan
from planner.verification.measure import measure_peak
from tests.side_by_side import Layers, no_plan_warnings

pytestmark = pytest.mark.timed


class _Module(lightning.LightningModule):
    """Configures its model late, computes its loss outside of it, logs, and measures its fourth update."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Layers | None = None
        self.register_buffer("count", torch.zeros(()))
        self.plans: list[object] = []
        self.updates = self.peak = 0
        self.callback: PlannerCallback | None = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = Layers(2)

    def training_step(self, batch: torch.Tensor, index: int) -> dict[str, Any]:
        assert self.model is not None
        found = self.model.run(batch)
        loss = F.mse_loss(found.softmax(-1), batch.softmax(-1)) + self.model(batch)
        self.log("count", self.count)
        self.count += 1
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"square": loss.square(), "constant": 2.0}, batch_size=len(batch))
        return {"loss": loss}

    def on_train_batch_start(self, *_: Any) -> None:
        if self.callback is not None and isinstance(self.callback.step, PlannedStep):
            self.plans.append(self.callback.step.plan)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.updates += 1
        step = super().optimizer_step
        if self.updates != 4:
            step(*args, **kwargs)
        else:
            self.peak = measure_peak(lambda: step(*args, **kwargs), "cpu").peak_bytes

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == 0 and self.trainer.checkpoint_callbacks and not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "first.ckpt")

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        assert self.model is not None
        self.log("validation", self.model(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def _train(
    folder: Path,
    options: dict[str, Any],
    callbacks: list[Any],
    resume: bool = False,
    kind: type[_Module] = _Module,
) -> _Module:
    generator = torch.Generator().manual_seed(1)
    sizes = (64, 64, 48, 64)
    batches = [torch.randn(size, 32, generator=generator) for size in sizes]
    module = kind()
    module.callback = next((c for c in callbacks if isinstance(c, PlannerCallback)), None)
    torch.manual_seed(2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, gradient_clip_val=0.5, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip
    checkpoint = folder / "first.ckpt" if resume else None
    with no_plan_warnings():
        trainer.fit(
            module,
            DataLoader(batches, batch_size=None),
            DataLoader(batches[:1], batch_size=None),
            ckpt_path=checkpoint,
        )
    module.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module


@pytest.mark.heavy
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"], ids=["float32", "bfloat16"])
def test_it_trains_to_the_same_weights(precision: str, tmp_path: Path) -> None:
    options = {"precision": precision, "accumulate_grad_batches": 2}
    ours = _train(tmp_path, options, [PlannerCallback(budget="min", solver="sqrt_n")])
    theirs = _train(tmp_path / "unplanned", options, [])
    assert len(ours.plans) == 12
    plan = ours.plans[-1]
    assert isinstance(plan, Plan)
    assert plan.recomputed_operations
    assert ours.peak == pytest.approx(plan.predicted.dynamic_peak_bytes, rel=0.005)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert ours.logged == theirs.logged
    assert {"loss_step", "loss_epoch", "square", "constant", "validation"} <= ours.logged.keys()
    assert not {"training_step", "log", "log_dict"} & vars(ours).keys()
    resumed = _train(tmp_path, options, [PlannerCallback(budget="min", solver="sqrt_n")], resume=True)
    assert 0 < len(resumed.plans) < 12
    theirs = _train(tmp_path / "unplanned", options, [], resume=True)
    for name, value in theirs.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


class _Skips(_Module):
    """Skips every other batch, the first among them, and reads the trainer."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        assert self.model is not None
        if index % 2 == 0:
            return None
        weight = 1.0 if self.trainer.num_training_batches == 4 else 2.0
        loss: torch.Tensor = weight * self.model(batch)
        return loss


class _GoesOn(_Skips):
    """Computes something else from the second epoch on."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        assert self.model is not None
        loss = super().training_step(batch, index)
        return loss + self.model(batch.flip(0)) if loss is not None and self.current_epoch else loss


@pytest.mark.heavy
@pytest.mark.parametrize("then", [_Skips, _GoesOn])
def test_a_step_that_skips_batches_and_reads_the_trainer(then: type[_Module], tmp_path: Path) -> None:
    for kind, resume in ((_Skips, False), (then, True)):  # which begins with the second epoch
        ours = _train(tmp_path, {}, [PlannerCallback(budget="min", solver="sqrt_n")], resume, kind)
        theirs = _train(tmp_path / "unplanned", {}, [], resume, kind)
        assert isinstance(ours.plans[-1], Plan)
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name


class _Reads(_Module):
    """Reads the gradients of the step before, right before the trainer lets go of them."""

    def on_before_zero_grad(self, _optimizer: Any) -> None:
        self.read = [*vars(self).get("read", ()), [p.grad for p in self.parameters()]]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", [_Module, _Reads])
def test_the_gradients_before_are_there_as_long_as_something_reads_them(
    kind: type[_Module], tmp_path: Path
) -> None:
    def train(callbacks: list[Any]) -> _Module:
        if kind is _Module:  # its last epoch has no backward, and steps once
            torch.manual_seed(0)
            averaging = StochasticWeightAveraging(1e-2, swa_epoch_start=1)
            averaging._model_contains_batch_norm = True
            averaging.pl_module_contains_batch_norm = lambda _module: True
            callbacks = [*callbacks, averaging]
        return _train(tmp_path, {"enable_checkpointing": False}, callbacks, kind=kind)

    ours, theirs = train([PlannerCallback(budget="min", solver="sqrt_n")]), train([])
    assert isinstance(ours.plans[-1], Plan)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    for mine, read in zip(vars(ours).get("read", ()), vars(theirs).get("read", ()), strict=True):
        for ours_, theirs_ in zip(mine, read, strict=True):
            assert (ours_ is None and theirs_ is None) or torch.equal(ours_, theirs_)


def test_what_cannot_be_planned_is_named() -> None:
    module = _Module()
    module.configure_model()
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(PlannerError, match=r"model='net': _Module has no submodule of that name"):
        PlannerCallback(budget="min", model="net").on_train_start(trainer, module)
    module.automatic_optimization = False
    with pytest.raises(PlannerError, match="optimizes manually"):
        PlannerCallback(budget="min").on_train_start(trainer, module)
    callback = PlannerCallback(budget="min", model="model")
    callback.on_train_start(trainer, module)
    callback.on_train_end(trainer, module)
    assert module.model is not None
    assert installed_plan(module.model) is None
