"""The models of the benchmarks, at full size and without weights.

Everything but the three reference models is built on the meta device: shapes, no data. ``build``
makes a model by name, or a shallow, narrow version of it. As a command it lists them:

    python benchmarks/models.py
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frontiers.nets import DeepResNet, DenseNet, DiffusionUNet, UnrolledLSTM
from tests import zoo

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, tuple[str, Callable[[bool], Built]]] = {}
"""By name: a line of description and the builder, whose argument says whether to build the small version."""

REFERENCE = ("gpt", "resnet", "unet")
"""Models of the test suite that the goals are about."""


def build(name: str, *, small: bool = False) -> Built:
    """Build a model, in train mode, with example inputs.

    Args:
        name: One of :data:`MODELS`.
        small: A few layers of small width instead of the full size.

    Returns:
        Module, positional and keyword arguments, all on the meta device (reference models: real).

    Raises:
        KeyError: There is no such model; the message lists them.
    """
    if name not in MODELS:
        raise KeyError(f"no model {name!r}; expected one of {', '.join(MODELS)}")
    if name in REFERENCE:
        return MODELS[name][1](small)
    with torch.device("meta"):
        module, args, kwargs = MODELS[name][1](small)
    return module.train(), args, kwargs


def _model(name: str, description: str) -> Callable[[Callable[[bool], Built]], Callable[[bool], Built]]:
    def register(function: Callable[[bool], Built]) -> Callable[[bool], Built]:
        MODELS[name] = (description, function)
        return function

    return register


def _words(batch: int, length: int) -> torch.Tensor:
    return torch.zeros((batch, length), dtype=torch.long)


def _causal(words: torch.Tensor) -> dict[str, Any]:
    """Arguments of a causal language model. Without a mask it would look for packed sequences in its data,
    of which there is none."""
    length = words.shape[1]
    mask = torch.ones(len(words), 1, length, length, dtype=torch.bool)
    return {"input_ids": words, "attention_mask": mask, "labels": words, "use_cache": False}


def _classified(model: nn.Module, batch: int, size: int) -> Built:
    inputs = (torch.empty(batch, 3, size, size), torch.zeros(batch, dtype=torch.long))
    return zoo.WithLoss(model), inputs, {}


# ---- reference models ---------------------------------------------------------------------------------


@_model("gpt", "6-layer transformer with dropout, batch 8, 128 tokens")
def gpt(small: bool) -> Built:
    torch.manual_seed(0)
    if small:
        words = torch.randint(0, 50, (2, 4, 32))
        model = zoo.GPT(words=50, width=32, heads=2, layers=3, context=32)
        return model.train(), (words[0], words[1]), {}
    return zoo.build("gpt")


@_model("resnet", "9 residual blocks with batch normalisation, batch 16, 64 x 64")
def resnet(small: bool) -> Built:
    torch.manual_seed(0)
    if small:
        model = zoo.ResNet(width=8, stages=(2, 2))
        return model.train(), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))), {}
    return zoo.build("resnet")


@_model("unet", "U-Net of 4 levels with batch normalisation, batch 4, 128 x 128")
def unet(small: bool) -> Built:
    torch.manual_seed(0)
    if small:
        model = zoo.UNet(width=4, depth=2)
        return model.train(), (torch.randn(2, 3, 16, 16), torch.randint(0, 10, (2, 16, 16))), {}
    return zoo.build("unet")


# ---- transformers -------------------------------------------------------------------------------------


@_model("bert-large", "BERT-Large masked language model, 24 layers, batch 32, 512 tokens")
def bert_large(small: bool) -> Built:
    import transformers

    size = (
        {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        if small
        else {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        }
    )
    words = _words(2, 16) if small else _words(32, 512)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    return transformers.BertForMaskedLM(transformers.BertConfig(**size)), (), inputs


@_model("gpt2-xl", "GPT-2 XL, 48 layers, batch 2, 1024 tokens")
def gpt2_xl(small: bool) -> Built:
    import transformers

    size = (
        {"n_layer": 3, "n_embd": 32, "n_head": 2} if small else {"n_layer": 48, "n_embd": 1600, "n_head": 25}
    )
    words = _words(2, 16) if small else _words(2, 1024)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, use_cache=False))
    return model, (), _causal(words)


@_model("llama-7b", "Llama of 7 billion parameters, 32 layers, batch 4, 2048 tokens")
def llama_7b(small: bool) -> Built:
    import transformers

    size = (
        {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
         "vocab_size": 100}
        if small
        else {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
              "intermediate_size": 11008, "vocab_size": 32000}
    )  # fmt: skip
    words = _words(1, 16) if small else _words(4, 2048)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, use_cache=False))
    return model, (), _causal(words)


@_model("t5-base", "T5-Base, encoder and decoder of 12 layers, batch 16, 512 and 128 tokens")
def t5_base(small: bool) -> Built:
    import transformers

    size = (
        {"num_layers": 2, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2}
        if small
        else {"num_layers": 12, "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12}
    )
    source, target = (_words(2, 16), _words(2, 8)) if small else (_words(16, 512), _words(16, 128))
    config = transformers.T5Config(**size, use_cache=False, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    return model, (), {"input_ids": source, "labels": target, "use_cache": False}


# ---- convolutional nets -------------------------------------------------------------------------------


@_model("resnet-152", "ResNet-152, batch 32, 224 x 224")
def resnet_152(small: bool) -> Built:
    if small:
        return _classified(zoo.BottleneckNet((1, 2, 1, 1), 10), 2, 32)
    return _classified(zoo.BottleneckNet((3, 8, 36, 3)), 32, 224)


@_model("resnet-1001", "ResNet-1001 (pre-activation, 333 blocks), batch 128, 32 x 32")
def resnet_1001(small: bool) -> Built:
    if small:
        return _classified(DeepResNet(2, 4), 2, 16)
    return _classified(DeepResNet(111), 128, 32)


@_model("densenet-201", "DenseNet-201, batch 32, 224 x 224")
def densenet_201(small: bool) -> Built:
    if small:
        return _classified(DenseNet((2, 3, 2), 4, 10), 2, 32)
    return _classified(DenseNet((6, 12, 48, 32)), 32, 224)


# ---- diffusion ----------------------------------------------------------------------------------------


@_model("sd-unet", "U-Net of Stable Diffusion 1.5's shape, batch 4, latent 64 x 64, 77 words")
def sd_unet(small: bool) -> Built:
    widths, context, batch, side = ((8, 16), 8, 1, 8) if small else ((320, 640, 1280, 1280), 768, 4, 64)
    model = DiffusionUNet(widths, context, *((2, 4) if small else (8, 32)))
    image = torch.empty(batch, 4, side, side)
    return model, (image, torch.empty(batch, widths[0]), torch.empty(batch, 77, context), image), {}


# ---- recurrent ----------------------------------------------------------------------------------------


@_model("lstm-1000", "an LSTM cell unrolled over 1000 steps, batch 32, width 256")
def lstm_1000(small: bool) -> Built:
    steps, batch, width = (100, 2, 8) if small else (1000, 32, 256)
    model = UnrolledLSTM(width)
    return model, (torch.empty(steps, batch, width), torch.zeros(batch, dtype=torch.long)), {}


if __name__ == "__main__":
    for _name, (_description, _) in MODELS.items():
        print(f"{_name:14} {_description}")
