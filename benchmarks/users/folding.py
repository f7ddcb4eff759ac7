"""Protein folding: blocks of pairs and alignments, which run again on their own results."""

import copy
import random
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.users.training import Training, average, mlp, program


class GatedAttention(nn.Module):
    """Attention along the last but one dimension, with a bias of pairs and a gate."""

    def __init__(self, width: int, pair: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.pair_norm = nn.LayerNorm(width), nn.LayerNorm(pair)
        self.qkv, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.bias, self.out = nn.Linear(pair, heads, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, pair: torch.Tensor | None) -> torch.Tensor:
        x = self.norm(x)
        shape = (*x.shape[:-1], self.heads, -1)
        q, k, v = (part.view(shape).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1))
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if pair is not None:
            logits = logits + self.bias(self.pair_norm(pair)).movedim(-1, -3)
        y = (logits.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * y)


class Triangle(nn.Module):
    """Pairs are updated along the third side of a triangle."""

    def __init__(self, pair: int, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.norm, self.norm_out = nn.LayerNorm(pair), nn.LayerNorm(pair)
        self.ab, self.ab_gate = nn.Linear(pair, 2 * pair), nn.Linear(pair, 2 * pair)
        self.gate, self.out = nn.Linear(pair, pair), nn.Linear(pair, pair)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        z = self.norm(z)
        a, b = (self.ab(z) * torch.sigmoid(self.ab_gate(z))).chunk(2, -1)
        sides = "bikc,bjkc->bijc" if self.outgoing else "bkic,bkjc->bijc"
        return torch.sigmoid(self.gate(z)) * self.out(self.norm_out(torch.einsum(sides, a, b)))


def dropout_rows(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    """One mask for all rows, as these models have it."""
    if not training:
        return x
    mask = F.dropout(torch.ones_like(x[:, :1]), rate, training)
    return x * mask


class Pairformer(nn.Module):
    """One block on pairs and single residues."""

    def __init__(self, single: int, pair: int) -> None:
        super().__init__()
        self.triangles = nn.ModuleList([Triangle(pair, True), Triangle(pair, False)])
        self.around = nn.ModuleList([GatedAttention(pair, pair), GatedAttention(pair, pair)])
        self.pair_mlp = nn.Sequential(nn.LayerNorm(pair), mlp(pair, 2 * pair, pair, activation=nn.ReLU))
        self.attention = GatedAttention(single, pair)
        self.mlp = nn.Sequential(nn.LayerNorm(single), mlp(single, 2 * single, single, activation=nn.ReLU))

    def forward(self, s: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for triangle in self.triangles:
            z = z + dropout_rows(triangle(z), 0.25, self.training)
        z = z + dropout_rows(self.around[0](z, z[:, None]), 0.25, self.training)
        z = z + dropout_rows(
            self.around[1](z.transpose(1, 2), z[:, None]).transpose(1, 2), 0.25, self.training
        )
        z = z + self.pair_mlp(z)
        s = s + self.attention(s, z)
        return s + self.mlp(s), z


class Evoformer(nn.Module):
    """One block on an alignment and pairs."""

    def __init__(self, msa: int, pair: int) -> None:
        super().__init__()
        self.rows, self.columns = GatedAttention(msa, pair), GatedAttention(msa, pair)
        self.transition = nn.Sequential(nn.LayerNorm(msa), mlp(msa, 4 * msa, msa, activation=nn.ReLU))
        self.norm, self.ab, self.outer = nn.LayerNorm(msa), nn.Linear(msa, 16), nn.Linear(64, pair)
        self.pairs = Pairformer(msa, pair)

    def forward(self, m: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = m + dropout_rows(self.rows(m, z[:, None]), 0.15, self.training)
        m = m + self.columns(m.transpose(1, 2), None).transpose(1, 2)
        m = m + self.transition(m)
        a, b = self.ab(self.norm(m)).chunk(2, -1)
        z = z + self.outer(torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2) / m.shape[1])
        first, z = self.pairs(m[:, 0], z)
        return torch.cat([first[:, None], m[:, 1:]], 1), z


class Folding(nn.Module):
    """Recycles its results: all but the last pass are without gradients."""

    def __init__(self, msa: int = 32, pair: int = 24, blocks: int = 2) -> None:
        super().__init__()
        self.embed_msa, self.embed_pair = nn.Linear(23, msa), nn.Linear(65, pair)
        self.left, self.right = nn.Linear(23, pair), nn.Linear(23, pair)
        self.norm_m, self.norm_z = nn.LayerNorm(msa), nn.LayerNorm(pair)
        self.blocks = nn.ModuleList(Evoformer(msa, pair) for _ in range(blocks))
        self.distogram, self.masked = nn.Linear(pair, 32), nn.Linear(msa, 23)

    def iteration(
        self, msa: torch.Tensor, previous: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, places = msa[:, 0], torch.arange(msa.shape[2])
        relative = F.one_hot((places[:, None] - places).clamp(-32, 32) + 32, 65).to(msa.dtype)
        m = self.embed_msa(msa)
        z = self.left(first)[:, :, None] + self.right(first)[:, None] + self.embed_pair(relative)
        if previous is not None:
            m = torch.cat([(m[:, 0] + self.norm_m(previous[0]))[:, None], m[:, 1:]], 1)
            z = z + self.norm_z(previous[1])
        for block in self.blocks:
            m, z = block(m, z)
        return m, z

    def forward(self, msa: torch.Tensor, recycles: int) -> dict[str, torch.Tensor]:
        previous = None
        for cycle in range(recycles + 1):
            last = cycle == recycles
            with torch.set_grad_enabled(torch.is_grad_enabled() and last):
                if last and torch.is_autocast_enabled("cpu"):
                    torch.clear_autocast_cache()  # casts of the passes before have no gradients
                m, z = self.iteration(msa, previous)
                previous = (m[:, 0].detach(), z.detach())
        logits = self.distogram(z)
        return {"distogram": logits + logits.transpose(1, 2), "masked": self.masked(m)}


@program
def evoformer(training: Training) -> dict[str, Any]:
    """Recycling with a number of passes that Python draws, bf16, losses outside, clipping, an average."""
    model = Folding()
    mean = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-6)

    def train_step(model: nn.Module, msa: torch.Tensor, bins: torch.Tensor, recycles: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(msa, recycles)
        distances = F.cross_entropy(output["distogram"].float().flatten(0, 2), bins.flatten())
        return 0.3 * distances + 2.0 * F.cross_entropy(
            output["masked"].float().flatten(0, 2), msa.argmax(-1).flatten()
        )

    train_step = training.step(train_step)
    msa = F.one_hot(torch.randint(0, 23, (1, 8, 24)), 23).float()
    bins = torch.randint(0, 32, (1, 24, 24))
    losses = []
    for _ in range(4):
        recycles = random.randint(0, 2)
        optimizer.zero_grad()

        def step(recycles: int = recycles) -> torch.Tensor:
            loss = train_step(model, msa, bins, recycles)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        average(mean, model, 0.999)
    return {"losses": losses, "model": model, "mean": mean, "optimizer": optimizer}


class PairTrunk(nn.Module):
    """Blocks of pairs, each in a checkpoint, and coordinates that are denoised."""

    def __init__(self, single: int = 32, pair: int = 24, blocks: int = 3) -> None:
        super().__init__()
        self.single, self.pair = nn.Linear(21, single), nn.Linear(42, pair)
        self.blocks = nn.ModuleList(Pairformer(single, pair) for _ in range(blocks))
        self.denoise = mlp(single + 4, 64, 3)
        self.confidence = nn.Linear(pair, 16)

    def forward(
        self, sequence: torch.Tensor, noisy: torch.Tensor, sigma: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.single(sequence)
        length = sequence.shape[1]
        both = [sequence[:, :, None].expand(-1, -1, length, -1), sequence[:, None].expand(-1, length, -1, -1)]
        z = self.pair(torch.cat(both, -1))
        for block in self.blocks:
            s, z = checkpoint(block, s, z, use_reentrant=False)
        level = sigma.log()[..., None, None].expand(*noisy.shape[:-1], 1) / 4
        moves = self.denoise(torch.cat([s.expand(*noisy.shape[:-2], *s.shape[-2:]), noisy, level], -1))
        return noisy - moves * sigma[..., None, None], self.confidence(z)


@program
def pairformer(training: Training) -> dict[str, Any]:
    """The user's own checkpoints, several noise levels at once, an alignment by SVD without gradients."""
    model = PairTrunk()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    sequence = F.one_hot(torch.randint(0, 21, (1, 24)), 21).float()
    truth = torch.randn(1, 24, 3)

    def train_step(model: nn.Module, noisy: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        denoised, confidence = model(sequence, noisy, sigma)
        with torch.no_grad():
            u, _, vh = torch.linalg.svd(denoised.mT @ truth)
            sign = torch.det(u @ vh).sign()
            rotation = torch.cat([u[..., :2], u[..., 2:] * sign[..., None, None]], -1) @ vh
            aligned = truth @ rotation.mT
            wrong = (denoised - aligned).norm(dim=-1)[0].clamp(max=15).long()
        loss = ((denoised - aligned).square().mean((-1, -2)) * (sigma.square() + 1) / sigma.square()).mean()
        rows = confidence[0].mean(0)
        return loss + 0.1 * F.cross_entropy(rows, wrong)

    train_step = training.step(train_step)
    losses = []
    for _ in range(3):
        sigma = torch.exp(torch.randn(4) * 0.5)
        noisy = truth + sigma[:, None, None] * torch.randn(4, 24, 3)
        optimizer.zero_grad()

        def step(noisy: torch.Tensor = noisy, sigma: torch.Tensor = sigma) -> torch.Tensor:
            loss = train_step(model, noisy, sigma)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}
