"""Small models that ``benchmarks/compiled.py`` measures: each a builder of a module and its inputs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from tests.zoo import GPT, WithLoss, torchvision_shim

Inputs = tuple[Any, ...]
Built = tuple[nn.Module, Inputs]


class OwnLoss(nn.Module):
    """A model of a library, called with what it takes by name, that returns its loss only."""

    def __init__(self, inside: nn.Module, names: tuple[str, ...], **settings: Any) -> None:
        super().__init__()
        self.inside, self.names, self.settings = inside, names, settings

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        taken: Any = dict(zip(self.names, inputs, strict=True))
        return self.inside(**taken, **self.settings).loss


class Denoised(nn.Module):
    """A U-Net with the loss of diffusion training."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, image: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.inside(image, time).sample, noise)


class Block(nn.Module):
    """A residual block with a wide middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = (
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


class Shared(nn.Module):
    """Eight blocks that run twice in a step, each run a checkpoint if that is asked for."""

    def __init__(self, width: int = 64, blocks: int = 8, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def gpt(dropout: float = 0.1) -> Built:
    """Two layers of width 128, 8 x 64 words."""
    words = torch.randint(0, 200, (2, 8, 64))
    return GPT(words=200, width=128, heads=4, layers=2, context=64, dropout=dropout), (words[0], words[1])


def bert() -> Built:
    """Hugging Face's BERT, dropout on: two layers of width 128, 8 x 64 words."""
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=500
    )
    words = torch.randint(3, 500, (8, 64))
    names = ("input_ids", "attention_mask", "labels")
    return OwnLoss(transformers.BertForMaskedLM(config), names), (words, torch.ones_like(words), words)


def gpt2() -> Built:
    """Hugging Face's GPT-2, dropout on: two layers of width 128, 8 x 64 words."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=500, n_positions=64)
    words = torch.randint(3, 500, (8, 64))
    model = transformers.GPT2LMHeadModel(config)
    return OwnLoss(model, ("input_ids", "labels"), use_cache=False), (words, words)


def llama() -> Built:
    """Hugging Face's Llama: two layers of width 128, 8 x 64 words."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=344, vocab_size=500, max_position_embeddings=64,
    )  # fmt: skip
    words = torch.randint(3, 500, (8, 64))
    model = transformers.LlamaForCausalLM(config)
    return OwnLoss(model, ("input_ids", "labels"), use_cache=False), (words, words)


def resnet(blocks: tuple[int, ...], images: int = 16, size: int = 64) -> Built:
    """timm's ResNet of bottlenecks, so many in each stage, square images of so many pixels."""
    torchvision_shim.install()
    from timm.models import resnet

    model = WithLoss(resnet.ResNet(resnet.Bottleneck, blocks, num_classes=10))
    return model, (torch.randn(images, 3, size, size), torch.randint(0, 10, (images,)))


def unet() -> Built:
    """diffusers' U-Net with attention, two resolutions, 8 images of 16 x 16."""
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    image = torch.randn(8, 3, 16, 16)
    return Denoised(model), (image, torch.randint(0, 1000, (8,)), torch.randn(8, 3, 16, 16))


def shared() -> Built:
    """Eight blocks of width 64 that run twice, 1024 rows."""
    return Shared(), (torch.randn(1024, 64),)


MODELS: dict[str, Callable[[], Built]] = {
    "gpt": gpt,
    "gpt-no-dropout": lambda: gpt(0.0),
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "resnet14": lambda: resnet((1, 1, 1, 1)),
    "resnet50": lambda: resnet((3, 4, 6, 3), images=8, size=128),
    "resnet50-64": lambda: resnet((3, 4, 6, 3)),
    "unet": unet,
    "shared": shared,
}
_KEPT = {f"{name}-nchw": MODELS[name] for name in ("resnet14", "resnet50")}
MODELS |= _KEPT
INDUCTOR: dict[str, dict[str, Any]] = {name: {"layout_optimization": False} for name in _KEPT}
"""Options of Inductor for a model, without a plan.

A plan keeps the layouts of the model unless told otherwise. Where Inductor is told to keep them too, both
compute the same convolutions.
"""


class Checkpointed(nn.Module):
    """A block whose forward runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def build(name: str) -> Built:
    """A model in training mode and its inputs, the same every time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.train(), inputs


def with_checkpoints(model: nn.Module) -> bool:
    """Put a checkpoint around every block of a model; whether it has blocks that this knows."""
    if isinstance(model, Shared):
        model.checkpointed = True
        return True
    if isinstance(model, GPT):
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        return True
    enable = getattr(getattr(model, "inside", None), "gradient_checkpointing_enable", None)
    if enable is None:
        return False
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return True
