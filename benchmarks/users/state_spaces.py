"""State spaces and memories: scans written by hand, in place, by transforms, and a machine with a tape."""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, program


class SelectiveScan(nn.Module):
    """Mamba's block; the scan is a loop, or the function that it is given."""

    def __init__(self, width: int = 48, state: int = 8, scan: Any = None) -> None:
        super().__init__()
        inner = 2 * width
        self.state, self.rank, self.scan = state, 4, scan
        self.norm = nn.RMSNorm(width)
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select = nn.Linear(inner, self.rank + 2 * state, bias=False)
        self.step = nn.Linear(self.rank, inner)
        self.log_a = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, width, bias=False)
        self.log_a._no_weight_decay = self.skip._no_weight_decay = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.enter(self.norm(x)).chunk(2, -1)
        u = F.silu(self.convolution(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.select(u).split([self.rank, self.state, self.state], -1)
        step = F.softplus(self.step(step))
        a = -torch.exp(self.log_a.float())
        decay = torch.exp(step[..., None] * a)
        entering = (step * u)[..., None] * b[:, :, None]
        if self.scan is not None:
            h = self.scan(decay, entering)
            y = (h @ c[..., None].to(h.dtype)).squeeze(-1)
        else:
            h, ys = torch.zeros_like(entering[:, 0]), []
            for t in range(x.shape[1]):
                h = decay[:, t] * h + entering[:, t]
                ys.append(torch.einsum("bdn,bn->bd", h, c[:, t].to(h.dtype)))
            y = torch.stack(ys, 1)
        y = y + u * self.skip
        return x + self.leave(y.to(gate.dtype) * F.silu(gate))


class ParallelScan(torch.autograd.Function):
    """The scan as a tree, in place on views of a clone; the backward is a scan too (mamba.py has it so)."""

    @staticmethod
    def scan(a: torch.Tensor, x: torch.Tensor) -> None:
        batch, width, length, _ = a.shape
        levels = int(math.log2(length))
        aa, xx = a, x
        for _ in range(levels):
            half = xx.size(2) // 2
            aa, xx = aa.view(batch, width, half, 2, -1), xx.view(batch, width, half, 2, -1)
            xx[:, :, :, 1].add_(aa[:, :, :, 1].mul(xx[:, :, :, 0]))
            aa[:, :, :, 1].mul_(aa[:, :, :, 0])
            aa, xx = aa[:, :, :, 1], xx[:, :, :, 1]
        for level in range(levels - 1, -1, -1):
            aa, xx = (t[:, :, 2**level - 1 : length : 2**level] for t in (a, x))
            aa = aa[:, :, : 2 * (xx.size(2) // 2)].view(batch, width, xx.size(2) // 2, 2, -1)
            xx = xx[:, :, : 2 * (xx.size(2) // 2)].view(batch, width, xx.size(2) // 2, 2, -1)
            xx[:, :, 1:, 0].add_(aa[:, :, 1:, 0].mul(xx[:, :, :-1, 1]))
            aa[:, :, 1:, 0].mul_(aa[:, :, :-1, 1])

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a_in, x_in = a, x
        a, x = a_in.clone().transpose(2, 1).contiguous(), x_in.clone().transpose(2, 1).contiguous()
        ParallelScan.scan(a, x)
        ctx.save_for_backward(a_in, x)
        return x.transpose(2, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a_in, x = ctx.saved_tensors
        gradient = gradient.clone().transpose(2, 1).contiguous()
        a = F.pad(a_in.transpose(2, 1)[:, :, 1:], (0, 0, 0, 1)).flip(2).contiguous()
        flipped = gradient.flip(2).contiguous()
        ParallelScan.scan(a, flipped)
        gradient = flipped.flip(2)
        q = torch.zeros_like(x)
        q[:, :, 1:].add_(x[:, :, :-1] * gradient[:, :, 1:])
        return q.transpose(2, 1), gradient.transpose(2, 1)


class Language(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int = 48, words: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers, self.norm = nn.ModuleList(layers), nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def trained_on_words(training: Training, model: nn.Module, dtype: torch.dtype, length: int) -> dict[str, Any]:
    """Groups by weight decay, warmup, clipping, two micro-batches in autocast."""
    decayed = [p for p in model.parameters() if p.ndim > 1 and not hasattr(p, "_no_weight_decay")]
    others = [p for p in model.parameters() if p.ndim <= 1 or hasattr(p, "_no_weight_decay")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 1e-3, (0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ],
        [2],
    )

    def train_step(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(words[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()) / 2

    train_step = training.step(train_step)
    losses = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            words = torch.randint(0, 200, (4, length + 1))

            def step(words: torch.Tensor = words) -> torch.Tensor:
                loss = train_step(model, words)
                loss.backward()
                return loss.detach()

            losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


@program
def mamba(training: Training) -> dict[str, Any]:
    """A scan as a loop, in bf16, with tied embeddings."""
    return trained_on_words(training, Language([SelectiveScan() for _ in range(2)]), torch.bfloat16, 32)


@program
def mamba_parallel_scan(training: Training) -> dict[str, Any]:
    """A scan as a function of autograd, in place on views, in single precision."""
    layers: list[nn.Module] = [SelectiveScan(scan=ParallelScan.apply) for _ in range(2)]
    return trained_on_words(training, Language(layers), torch.float32, 64)


class S4(nn.Module):
    """A diagonal state space: a kernel of complex exponentials, convolved by Fourier transforms."""

    def __init__(self, width: int = 48, state: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.log_step = nn.Parameter(torch.rand(width) * 4 - 7)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(width, state, dtype=torch.cfloat)))
        self.log_real = nn.Parameter(torch.full((width, state), 0.5).log())
        self.imaginary = nn.Parameter(math.pi * torch.arange(state).float().repeat(width, 1))
        self.d = nn.Parameter(torch.randn(width))
        self.dropout, self.out = nn.Dropout(0.1), nn.Conv1d(width, 2 * width, 1)

    def kernel(self, length: int) -> torch.Tensor:
        a = -self.log_real.exp() + 1j * self.imaginary
        stepped = a * self.log_step.exp()[:, None]
        powers = torch.exp(stepped[..., None] * torch.arange(length))
        scaled = torch.view_as_complex(self.c) * (torch.exp(stepped) - 1) / a
        return 2 * torch.einsum("hn,hnl->hl", scaled, powers).real

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.norm(x).transpose(1, 2)
        length = u.shape[-1]
        transformed = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(self.kernel(length), n=2 * length)
        y = torch.fft.irfft(transformed, n=2 * length)[..., :length] + u * self.d[:, None]
        return x + F.glu(self.out(self.dropout(F.gelu(y))), dim=1).transpose(1, 2)


@program
def s4(training: Training) -> dict[str, Any]:
    """Complex numbers inside of real parameters, transforms, dropout; a rate of its own for the kernel."""
    return trained_on_words(training, Language([S4() for _ in range(3)]), torch.float32, 64)


class TuringMachine(nn.Module):
    """A controller that reads and writes a memory by content and by shifts."""

    def __init__(self, wide: int = 8, rows: int = 24, columns: int = 12, controller: int = 64) -> None:
        super().__init__()
        self.rows, self.columns, self.wide = rows, columns, wide
        self.controller = nn.LSTMCell(wide + 1 + columns, controller)
        self.address = nn.ModuleList(nn.Linear(controller, columns + 6) for _ in range(2))
        self.write = nn.Linear(controller, 2 * columns)
        self.out = nn.Linear(controller + columns, wide)
        self.register_buffer("memory", torch.empty(rows, columns).uniform_(-0.1, 0.1))
        self.start_h = nn.Parameter(torch.randn(1, controller) * 0.05)
        self.start_c = nn.Parameter(torch.randn(1, controller) * 0.05)

    def weights(self, raw: torch.Tensor, memory: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        key, (beta, gate, sharp), shift = raw[:, : self.columns], raw[:, -6:-3].unbind(1), raw[:, -3:]
        alike = F.cosine_similarity(memory + 1e-16, key[:, None].tanh() + 1e-16, dim=-1)
        content = F.softmax(F.softplus(beta)[:, None] * alike, 1)
        mixed = torch.sigmoid(gate)[:, None] * content + (1 - torch.sigmoid(gate)[:, None]) * before
        s = shift.softmax(1)
        moved = torch.stack([mixed.roll(i, 1) for i in (-1, 0, 1)], -1) @ s[..., None]
        powered = moved.squeeze(-1) ** (1 + F.softplus(sharp))[:, None]
        return powered / (powered.sum(1, keepdim=True) + 1e-16)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        batch, length, _ = sequence.shape
        memory = self.memory.repeat(batch, 1, 1)
        h, c = self.start_h.expand(batch, -1), self.start_c.expand(batch, -1)
        read = memory.new_zeros(batch, self.columns)
        at = [F.one_hot(torch.zeros(batch, dtype=torch.long), self.rows).float() for _ in range(2)]
        outputs = []
        end = torch.zeros(batch, 1, self.wide + 1)
        end[..., -1] = 1
        entering = torch.cat([F.pad(sequence, (0, 1)), end, torch.zeros(batch, length, self.wide + 1)], 1)
        for t in range(2 * length + 1):
            h, c = self.controller(torch.cat([entering[:, t], read], 1), (h, c))
            at = [self.weights(head(h), memory, b) for head, b in zip(self.address, at, strict=True)]
            erase, add = self.write(h).chunk(2, 1)
            memory = memory * (1 - at[1][..., None] * torch.sigmoid(erase)[:, None])
            memory = memory + at[1][..., None] * add.tanh()[:, None]
            read = (at[0][:, None] @ memory).squeeze(1)
            if t > length:
                outputs.append(torch.sigmoid(self.out(torch.cat([h, read], 1))))
        return torch.stack(outputs, 1)


@program
def turing_machine(training: Training) -> dict[str, Any]:
    """The task of copying, sequences of another length every step, RMSprop, gradients clipped by value."""
    model = TuringMachine()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-4, alpha=0.95, momentum=0.9)

    def train_step(model: nn.Module, sequence: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(model(sequence), sequence)

    train_step = training.step(train_step)
    losses = []
    for length in (6, 6, 8, 5):
        sequence = torch.randint(0, 2, (16, length, 8)).float()
        optimizer.zero_grad()

        def step(sequence: torch.Tensor = sequence) -> torch.Tensor:
            loss = train_step(model, sequence)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step, sizes_vary=True))
        nn.utils.clip_grad_value_(model.parameters(), 10)
        optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}
