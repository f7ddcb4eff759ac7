"""A language model in the form of transformers' that Dynamo captures in a second, for tests of trainers."""

from typing import Any

import torch
import torch.nn as nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

Example = dict[str, torch.Tensor]


class _Config(PretrainedConfig):
    model_type = "small"
    vocab_size = 64


class _Block(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1))
        self.outer = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x) * mask
        return x + self.outer(inner + inner.cumsum(1) / mask.cumsum(1))


class SmallLanguageModel(PreTrainedModel):
    """Two layers, in each of which a token sees the average of those before it, and dropout."""

    config_class = _Config
    supports_gradient_checkpointing = True

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, 32)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(32, config.vocab_size)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> CausalLMOutput:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask.to(x.dtype).unsqueeze(-1))
        logits = self.head(x)
        loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


def small_language_model() -> SmallLanguageModel:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    return SmallLanguageModel(_Config())


def sentences(count: int = 48) -> list[Example]:
    """Sentences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(32, 24, 28, 20)[i % 4] for i in range(count)]
    words = [torch.randint(0, 64, (length,), generator=generator) for length in lengths]
    return [{"input_ids": w, "labels": w.clone(), "attention_mask": torch.ones_like(w)} for w in words]


def padded(examples: list[Example]) -> Example:
    """One batch of several sentences."""
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: nn.utils.rnn.pad_sequence([e[name] for e in examples], True, value)
        for name, value in filled.items()
    }
