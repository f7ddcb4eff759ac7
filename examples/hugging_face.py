"""Hugging Face's Trainer within a memory budget: one callback, and nothing else.

python examples/hugging_face.py --budget 60%
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))
from words import build_model, options, padded, sentences

from planner.integrations.huggingface import PlannerCallback


def train(budget: str | None, steps: int = 6) -> torch.nn.Module:
    """Train for some steps; without a plan where the budget is None."""
    callbacks = [] if budget is None else [PlannerCallback(budget=budget)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(
            build_model(), arguments, train_dataset=sentences(), data_collator=padded, callbacks=callbacks
        )
        trainer.train()
    return trainer.model


if __name__ == "__main__":
    given = options(__doc__).parse_args()
    train(given.budget, given.steps)
