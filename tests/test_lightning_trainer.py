"""Lightning's Trainer with the plan inside trains to the same weights."""

from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from planner.errors import PlannerError
from planner.integrations.lightning import PlannerCallback
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers, no_plan_warnings


class _Module(lightning.LightningModule):
    """Configures its model late, trains with a loss outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model: torch.nn.Module | None = None
        self.plans: list[object] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = Layers(2)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        assert self.model is not None
        loss: torch.Tensor = self.model(batch)
        self.plans.append(installed_plan(self.model))
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        assert self.model is not None
        self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def _train(folder: Any, precision: str, callbacks: list[Any]) -> _Module:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 32, generator=generator) for size in (64, 32, 48, 64)]
    module = _Module()
    torch.manual_seed(2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, accumulate_grad_batches=2, precision=precision,  # type: ignore[arg-type]
        gradient_clip_val=0.5, callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    with no_plan_warnings():
        trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches[:1], batch_size=None))
    return module


@pytest.mark.heavy
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_trains_to_the_same_weights(precision: str, tmp_path: Any) -> None:
    ours = _train(tmp_path, precision, [PlannerCallback(budget="min", solver="sqrt_n")])
    theirs = _train(tmp_path, precision, [])
    assert len(ours.plans) == 12
    assert all(plan is not None for plan in ours.plans)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert ours.model is not None
    assert installed_plan(ours.model) is None


def test_a_part_that_is_not_there_is_named() -> None:
    module = _Module()
    module.configure_model()
    with pytest.raises(PlannerError, match=r"model='net': _Module has no submodule of that name"):
        PlannerCallback(budget="min", model="net")._model_of(module)
