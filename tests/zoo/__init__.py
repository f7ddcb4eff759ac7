"""Real models with random weights, as builders of (module in train mode, args, kwargs).

``gpt``, ``resnet`` and ``unet`` are the reference models of the benchmarks: a transformer with
explicit attention and dropout, a convolutional net with batch normalisation and in-place ReLU, and
one with long skips. The other files of this package hold families of models, at toy width. Sizes are
for a CPU; seeds are fixed, so that a name always gives the same weights and inputs; nothing is
downloaded.
"""

import importlib
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from planner.user_plan import Plan
from planner.verification.measure import measure_peak

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Builder = Callable[[], Built]
ZOO: dict[str, Builder] = {}
FAMILIES = (
    "text", "decoders", "vision", "audio", "adapters", "timm_models", "diffusion",
    "layers", "generative", "convolutional", "recurrent", "structured", "difficult", "packages",
    "causal",
)  # fmt: skip
"""Files of this package with more models; importing one adds its models to ``ZOO``."""


def build(name: str) -> Built:
    """Build a model of the zoo, always the same one."""
    if name not in ZOO:
        everything()
    torch.manual_seed(0)
    module, args, kwargs = ZOO[name]()
    return module.train(), args, kwargs


def everything() -> dict[str, Builder]:
    """All models of all families."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return ZOO


def family_of(name: str) -> str:
    """The family that a model belongs to; the models of this file are the reference."""
    module = ZOO[name].__module__
    return "reference" if module == __name__ else module.rpartition(".")[2]


def in_zoo(function: Builder) -> Builder:
    ZOO[function.__name__] = function
    return function


def in_zoo_as(name: str, function: Builder) -> None:
    """Add a builder under a name; its family is the file that it is written in."""
    ZOO[name] = function


def scalar_loss(output: Any) -> torch.Tensor:
    """The model's own loss, or a scalar of all its outputs.

    Elements count unevenly: the plain sum behind a normalisation has a gradient of zero.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own.mean()
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output.reshape(())
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    total = torch.zeros(())
    for tensor in tensors:
        values = tensor.float()
        weights = torch.linspace(-1, 1, values.numel(), device=values.device).view(values.shape)
        total = total + (values * weights).mean() + values.square().mean()
    return total


def fresh_peak(name: str, plan: Plan) -> int:
    """Bytes that the second step of a model peaks at that was built, planned and then called for the first
    time: what a first forward sets up is there by then."""
    module, args, kwargs = build(name)
    plan.apply(module)
    random.seed(0)
    at_first = random.getstate(), torch.get_rng_state()

    def step() -> Any:
        random.setstate(at_first[0])
        torch.set_rng_state(at_first[1])
        output = module(*args, **kwargs)
        loss = scalar_loss(output)
        loss.backward()
        return output, loss

    step()
    module.zero_grad()
    return measure_peak(step, "cpu").peak_bytes


def words(batch: int = 4, length: int = 32, vocabulary: int = 256) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, vocabulary, (batch, length))


def images(batch: int = 4, side: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, side, side)


# ---- reference models -------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer layer with explicit attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        per_head = width // self.heads
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (p.view(batch, time, self.heads, per_head).transpose(1, 2) for p in parts)
        weights = self.dropout(((query @ key.transpose(-1, -2)) / per_head**0.5).softmax(-1))
        x = x + self.dropout(self.out((weights @ value).transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A language model that returns its loss."""

    def __init__(
        self, words: int = 1000, width: int = 256, heads: int = 4, layers: int = 6, context: int = 128,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def convolution(wide_in: int, wide_out: int, stride: int = 1, *, relu: bool = True) -> nn.Sequential:
    layers = [nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False), nn.BatchNorm2d(wide_out)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(wide_in, wide_out, stride)
        self.second = convolution(wide_out, wide_out, relu=False)
        same = wide_in == wide_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(wide_in, wide_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class ResNet(nn.Module):
    """A small residual net that returns its loss."""

    def __init__(self, width: int = 32, stages: tuple[int, ...] = (3, 3, 3)) -> None:
        super().__init__()
        self.stem = convolution(3, width)
        blocks, wide = [], width
        for stage, count in enumerate(stages):
            for i in range(count):
                blocks.append(Residual(wide, width * 2**stage, 2 if stage and not i else 1))
                wide = width * 2**stage
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(wide, 10)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.stem(image)).mean((2, 3))), label)


class UNet(nn.Module):
    """Downwards, upwards, and skips between: few places where one value separates the graph."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.down, self.up, wide = nn.ModuleList(), nn.ModuleList(), 3
        for i in range(depth):
            here = width * 2**i
            self.down.append(nn.Sequential(convolution(wide, here), convolution(here, here)))
            wide = here
        self.middle = nn.Sequential(convolution(wide, 2 * wide), convolution(2 * wide, wide))
        for i in reversed(range(depth)):
            here, narrower = width * 2**i, width * 2 ** max(i - 1, 0)
            self.up.append(nn.Sequential(convolution(wide + here, here), convolution(here, narrower)))
            wide = narrower
        self.out = nn.Conv2d(wide, 10, 1)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x, skips = image, []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return F.cross_entropy(self.out(x), label)


@in_zoo
def gpt() -> Built:
    return GPT(), (torch.randint(0, 1000, (8, 128)), torch.randint(0, 1000, (8, 128))), {}


@in_zoo
def resnet() -> Built:
    return ResNet(), (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), {}


@in_zoo
def unet() -> Built:
    return UNet(), (torch.randn(4, 3, 128, 128), torch.randint(0, 10, (4, 128, 128))), {}


# ---- real architectures ---------------------------------------------------------------------------


@in_zoo
def bert() -> Built:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=2000
    )
    words = torch.randint(3, 2000, (8, 128))
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    return transformers.BertForMaskedLM(config), (), inputs


@in_zoo
def gpt2() -> Built:
    import transformers

    config = transformers.GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=2000)
    words = torch.randint(3, 2000, (8, 128))
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": words, "labels": words}


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3, 1x1."""

    def __init__(self, wide_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide_out = 4 * width
        self.narrow, self.narrow_norm = nn.Conv2d(wide_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.middle_norm = nn.BatchNorm2d(width)
        self.widen, self.widen_norm = nn.Conv2d(width, wide_out, 1, bias=False), nn.BatchNorm2d(wide_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or wide_in != wide_out:
            project = nn.Conv2d(wide_in, wide_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(wide_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.narrow_norm(self.narrow(x)))
        y = self.relu(self.middle_norm(self.middle(y)))
        y = self.widen_norm(self.widen(y))
        y += self.shortcut(x)
        return self.relu(y)


class BottleneckNet(nn.Module):
    """ResNet-50, -101, -152 by the number of blocks; returns logits."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, wide = [], 64
        for stage, count in enumerate(blocks):
            for i in range(count):
                stages.append(Bottleneck(wide, 64 * 2**stage, 2 if stage and not i else 1))
                wide = 256 * 2**stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(wide, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(image)).mean((2, 3)))


class WithLoss(nn.Module):
    """A classifier together with its loss."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(x), label)


@in_zoo
def resnet50() -> Built:
    inputs = (torch.randn(16, 3, 128, 128), torch.randint(0, 1000, (16,)))
    return WithLoss(BottleneckNet()), inputs, {}


class EncoderLM(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask, as a language model."""

    def __init__(self, words: int = 1000, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        states = self.encoder(self.words(words), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


@in_zoo
def transformer_encoder() -> Built:
    return EncoderLM(), (torch.randint(0, 1000, (8, 64)), torch.randint(0, 1000, (8, 64))), {}


class LSTMLM(nn.Module):
    """A language model on ``nn.LSTM`` with dropout between its layers."""

    def __init__(self, words: int = 200, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, layers, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.words(words))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


@in_zoo
def lstm() -> Built:
    return LSTMLM(), (torch.randint(0, 200, (64, 64)), torch.randint(0, 200, (64, 64))), {}


REAL = tuple(ZOO)
"""The models that every capability is tried on."""
