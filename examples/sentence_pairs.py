"""Sentence Transformers' trainer within a memory budget: the callback plans the loss, which calls the model.

python examples/sentence_pairs.py --budget 60%

The loss runs the model once for each column of the data, here two. `max_length` says how long their sentences
get, so that the one plan that is made is for all batches.
"""

import random
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
from words import options

from planner.integrations.huggingface import PlannerCallback

LONGEST = 32


def build_model() -> SentenceTransformer:
    """A BERT of three layers behind a mean over its words, dropout on; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    with tempfile.TemporaryDirectory() as folder:
        BertModel(BertConfig(**sizes, vocab_size=128, max_position_embeddings=64)).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0").save_pretrained(
            folder
        )
        encoder = Transformer(folder, max_seq_length=LONGEST)
    return SentenceTransformer(modules=[encoder, Pooling(64)], device="cpu")


def pairs(count: int = 64) -> Dataset:
    """Questions, and longer answers."""
    draw = random.Random(1)

    def sentence(least: int, most: int) -> str:
        return " ".join(f"w{draw.randrange(1, 128)}" for _ in range(draw.randrange(least, most)))

    return Dataset.from_list(
        [{"question": sentence(8, 24), "answer": sentence(16, 40)} for _ in range(count)]
    )


def train(budget: str | None, steps: int = 6) -> torch.nn.Module:
    """Train for some steps; without a plan where the budget is None."""
    model = build_model()
    loss = MultipleNegativesRankingLoss(model)
    callbacks = [] if budget is None else [PlannerCallback(budget=budget, module=loss, max_length=LONGEST)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=pairs(), loss=loss, callbacks=callbacks
        )
        trainer.train()
    return model


if __name__ == "__main__":
    given = options(__doc__).parse_args()
    train(given.budget, given.steps)
