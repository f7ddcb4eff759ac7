"""Hugging Face models that ``benchmarks/ranks.py`` trains: small, most of a step's bytes in activations."""

from typing import Any

import torch

import planner

BLOCKS = {"llama": "model.layers.*", "bert": "bert.encoder.layer.*"}
"""The models, and what repeats in each."""


def build(name: str, *, tiny: bool = False) -> torch.nn.Module:
    """The same weights in every process. BERT has its dropout."""
    import transformers as hf

    torch.manual_seed(0)
    layers, width, words = (3, 32, 128) if tiny else (6, 128, 512)
    size: dict[str, Any] = {
        "vocab_size": words, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }  # fmt: skip
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **size)).train()
    return hf.BertForMaskedLM(hf.BertConfig(max_position_embeddings=64, **size)).train()


def batch(rank: int, *, tiny: bool = False) -> dict[str, torch.Tensor]:
    """A rank's batch."""
    words = torch.randint(0, 128 if tiny else 512, (8, 64), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": words, "labels": words}


def half_planned(name: str, *, tiny: bool = False, **options: Any) -> planner.Plan:
    """A plan for half of what the unplanned step takes over what is there throughout."""
    prepared = planner.prepare(
        build(name, tiny=tiny), batch(0, tiny=tiny), optimizer="adamw", outputs="dropped", **options
    )
    unplanned = prepared.plan("100%", solver="none")
    return prepared.plan(unplanned.resident.total + unplanned.baseline.dynamic_peak_bytes // 2)
