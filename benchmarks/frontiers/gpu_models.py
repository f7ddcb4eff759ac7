"""The models of the benchmark for GPUs, as large as they are trained, or small enough to try without one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from benchmarks.frontiers.nets import DiffusionUNet
from tests.zoo import BottleneckNet, WithLoss

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model of the benchmark.

    Attributes:
        build: Makes the model and its inputs on the default device; its argument says whether a small one.
        blocks: The classes of its blocks, which PyTorch's own checkpointing wraps.
    """

    build: Callable[[bool], tuple[nn.Module, Inputs]]
    blocks: tuple[str, ...]


def bert_large(small: bool) -> tuple[nn.Module, Inputs]:
    """Masked language model, 16 x 512 tokens."""
    import transformers

    size = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
            "vocab_size": 100} if small else {"num_hidden_layers": 24, "hidden_size": 1024,
            "num_attention_heads": 16, "intermediate_size": 4096}  # fmt: skip
    words = torch.randint(3, 100, (32, 64) if small else (16, 512))
    model = transformers.BertForMaskedLM(transformers.BertConfig(**size))
    return model, ((), {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words})


def gpt2(small: bool) -> tuple[nn.Module, Inputs]:
    """Language model, 8 x 1024 tokens."""
    import transformers

    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100} if small else {}
    words = torch.randint(3, 100, (32, 64) if small else (8, 1024))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, use_cache=False))
    return model, ((), {"input_ids": words, "labels": words, "use_cache": False})


def resnet_50(small: bool) -> tuple[nn.Module, Inputs]:
    """Classifier, 128 pictures of 224 x 224."""
    blocks, batch, side = ((1, 1, 1, 1), 16, 64) if small else ((3, 4, 6, 3), 128, 224)
    model = WithLoss(BottleneckNet(blocks))
    return model, ((torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))), {})


def sd_unet(small: bool) -> tuple[nn.Module, Inputs]:
    """U-Net of Stable Diffusion 1.5's shape, 4 latents of 64 x 64."""
    widths, context, batch, side = ((8, 16), 8, 8, 16) if small else ((320, 640, 1280, 1280), 768, 4, 64)
    model = DiffusionUNet(widths, context, *((2, 4) if small else (8, 32)))
    image, noise = torch.randn(2, batch, 4, side, side)
    return model, ((image, torch.randn(batch, widths[0]), torch.randn(batch, 77, context), noise), {})


CASES = {
    "bert-large": Case(bert_large, ("BertLayer",)),
    "gpt2": Case(gpt2, ("GPT2Block",)),
    "resnet-50": Case(resnet_50, ("Bottleneck",)),
    "sd-unet": Case(sd_unet, ("TimeBlock", "SpatialTransformer")),
}
