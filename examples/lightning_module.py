"""Lightning's Trainer within a memory budget: one callback, and nothing else.

python examples/lightning_module.py --budget 60%
"""

import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from words import Batch, build_model, options, padded, sentences

from planner.integrations.lightning import PlannerCallback


class LanguageModel(lightning.LightningModule):
    """A language model that learns what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: Batch) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(budget: str | None, steps: int = 6) -> torch.nn.Module:
    """Train for some steps; without a plan where the budget is None."""
    callbacks = [] if budget is None else [PlannerCallback(budget=budget)]
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, precision="bf16-mixed", gradient_clip_val=1.0,
        callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = LanguageModel()
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(sentences(), batch_size=4, collate_fn=padded))
    return module


if __name__ == "__main__":
    given = options(__doc__).parse_args()
    train(given.budget, given.steps)
