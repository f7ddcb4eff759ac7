"""TRL's SFTTrainer within a memory budget: the callback of Hugging Face's Trainer, and nothing else.

python examples/trl_sft.py --budget 100% --packing

TRL computes its loss from 32,768 words of a vocabulary at a time, which takes more than this small model:
there is no plan for less than 88 %.
"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parent))
from words import build_model, options, sentences

from planner.integrations.huggingface import PlannerCallback


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number that the model knows; the first one ends and fills sentences."""
    words = WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w0", pad_token="w0")


def train(budget: str | None, steps: int = 6, packing: bool = False) -> torch.nn.Module:
    """Train for some steps; without a plan where the budget is None."""
    callbacks = [] if budget is None else [PlannerCallback(budget=budget)]
    rows = [{"input_ids": sentence["input_ids"].tolist()} for sentence in sentences()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
            max_length=48, packing=packing, packing_strategy="wrapped",
        )  # fmt: skip
        trainer = SFTTrainer(
            build_model(), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
    return trainer.model


if __name__ == "__main__":
    parser = options(__doc__, budget="100%")
    parser.add_argument("--packing", action="store_true", help="sentences cut into rows of one length")
    given = parser.parse_args()
    train(given.budget, given.steps, given.packing)
