"""What the examples of trainers share: sentences of different lengths, and a small language model."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

Batch = dict[str, torch.Tensor]


def build_model() -> GPT2LMHeadModel:
    """A GPT-2 of two layers, dropout on; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def sentences(count: int = 32) -> list[Batch]:
    """Sentences; the longest are among the first, so that the first batch is the largest."""
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(1, 128, ((48, 40, 44, 36)[i % 4],), generator=generator) for i in range(count)]
    return [{"input_ids": w, "labels": w.clone(), "attention_mask": torch.ones_like(w)} for w in words]


def padded(batch: list[Batch]) -> Batch:
    """One batch of several sentences."""
    filler = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence([one[name] for one in batch], True, value)
        for name, value in filler.items()
    }


def options(description: str | None, budget: str = "60%") -> argparse.ArgumentParser:
    """What each example is told on the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget", default=budget)
    parser.add_argument("--steps", type=int, default=6)
    return parser
