"""Tensor parallelism within a memory budget: distribute the layers, plan one rank of it, apply.

torchrun --nproc-per-node 2 examples/tensor_parallel.py --budget 70%
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import planner

WORDS, WIDTH, HEAD, CONTEXT = 64, 32, 8, 32


class Attention(nn.Module):
    """As many heads as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """Returns the loss of predicting the next word."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def build_model(mesh: DeviceMesh, *, sequence: bool = False) -> Transformer:
    """The same weights in every process, then distributed.

    Args:
        mesh: The ranks.
        sequence: Distribute what is between the layers too, along the words of a sequence.
    """
    torch.manual_seed(0)
    model = Transformer().train()
    between = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=between),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        gathered = {"input_layouts": (between,), "desired_input_layouts": (Replicate(),)}
        styles |= {f"norm{n}": SequenceParallel() for n in (1, 2)}
        styles |= {name: PrepareModuleInput(**gathered) for name in ("attention", "feed_forward")}
        ends: dict[str, ParallelStyle] = {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, styles)
    return model


def batch(step: int) -> torch.Tensor:
    """A batch that is the same on all ranks, and another one in each step."""
    return torch.randint(0, WORDS, (8, CONTEXT), generator=torch.Generator().manual_seed(step))


def apply_one_plan(model: Transformer, budget: str) -> None:
    """Rank 0 plans, which needs no other rank, and all train by its plan; the budget is one rank's."""
    text: list[str | None] = [None]
    if dist.get_rank() == 0:
        text = [planner.plan(model, (batch(0),), budget=budget).dumps()]
    dist.broadcast_object_list(text)
    planner.Plan.loads(str(text[0])).apply(model)


def train(budget: str | None, steps: int = 3, *, sequence: bool = False) -> dict[str, torch.Tensor]:
    """The weights after some steps; without a plan where the budget is None."""
    model = build_model(init_device_mesh("cpu", (dist.get_world_size(),)), sequence=sequence)
    if budget is not None:
        apply_one_plan(model, budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    state = model.state_dict()
    return {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state.items()}


def main() -> None:
    """Train with and without a plan, and compare the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--sequence", action="store_true", help="distribute norms along the sequence, too")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    options = {"sequence": given.sequence}
    ours, theirs = train(given.budget, **options), train(None, **options)
    equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"rank {dist.get_rank()}: weights equal, bit for bit: {equal}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
