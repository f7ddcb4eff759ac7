"""Shared by the examples of data-parallel training: a small transformer, batches of words, one plan."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import planner

WORDS, WIDTH, CONTEXT = 64, 32, 32


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1, self.training)


class Transformer(nn.Module):
    """Returns the loss of predicting the next word."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def build_model() -> Transformer:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Transformer().train()


def batch(step: int, rank: int) -> torch.Tensor:
    """A batch that is another one in each step and process."""
    return torch.randint(0, WORDS, (8, CONTEXT), generator=torch.Generator().manual_seed(100 * step + rank))


def apply_one_plan(model: Transformer, budget: str, parallel: planner.FSDP2 | planner.DDP) -> None:
    """Rank 0 plans for all ranks, and all train by its plan; the budget is one rank's."""
    text: list[str | None] = [None]
    if dist.get_rank() == 0:
        plan = planner.plan(model, (batch(0, 0),), budget=budget, regions="auto", parallel=parallel)
        text = [plan.dumps()]
    dist.broadcast_object_list(text)
    planner.Plan.loads(str(text[0])).apply(model)
