"""Generative models: flows, adversaries with penalties of gradients, codebooks, diffusion."""

import copy
import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, average, mlp, program


class ActNorm(nn.Module):
    """Set up by the first batch that it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.log_scale = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.log_scale.copy_(-(x.std((0, 2, 3), keepdim=True) + 1e-6).log())
                self.ready.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum() * x.shape[2] * x.shape[3]


class FlowStep(nn.Module):
    def __init__(self, width: int, hidden: int = 48) -> None:
        super().__init__()
        self.norm = ActNorm(width)
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0])
        self.net = nn.Sequential(
            nn.Conv2d(width // 2, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, hidden, 1), nn.ReLU(),
            nn.Conv2d(hidden, width, 3, padding=1),
        )  # fmt: skip
        nn.init.normal_(self.net[-1].weight, std=1e-2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, log_det = self.norm(x)
        log_det = log_det + torch.linalg.slogdet(self.mix)[1] * x.shape[2] * x.shape[3]
        x = F.conv2d(x, self.mix[:, :, None, None])
        a, b = x.chunk(2, 1)
        shift, raw = self.net(a)[:, 0::2], self.net(a)[:, 1::2]
        scale = torch.sigmoid(raw + 2)
        return torch.cat([a, (b + shift) * scale], 1), log_det + scale.log().flatten(1).sum(1)


class Glow(nn.Module):
    def __init__(self, levels: int = 2, steps: int = 2) -> None:
        super().__init__()
        self.flows = nn.ModuleList()
        width = 3
        for _ in range(levels):
            width *= 4
            self.flows.append(nn.ModuleList(FlowStep(width) for _ in range(steps)))
            width //= 2
        self.levels = levels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand_like(x) / 256
        total = x.new_zeros(x.shape[0])
        for level, steps in enumerate(self.flows):
            x = F.pixel_unshuffle(x, 2)
            for step in steps:
                x, log_det = step(x)
                total = total + log_det
            if level < self.levels - 1:
                x, z = x.chunk(2, 1)
                total = total - 0.5 * (z.square() + math.log(2 * math.pi)).flatten(1).sum(1)
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(1)


@program
def glow(training: Training) -> dict[str, Any]:
    """Set up by the first batch, noise on the data, determinants, Adamax, clipping by norm and value."""
    model = Glow()
    optimizer = torch.optim.Adamax(model.parameters(), 1e-3, weight_decay=5e-5)

    def train_step(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
        return -model(image).mean() / (math.log(2) * image[0].numel())

    train_step = training.step(train_step)
    losses = []
    for _ in range(4):
        image = torch.rand(8, 3, 16, 16)
        optimizer.zero_grad()

        def step(image: torch.Tensor = image) -> torch.Tensor:
            loss = train_step(model, image)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_value_(model.parameters(), 5)
        nn.utils.clip_grad_norm_(model.parameters(), 100)
        optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


def generator(code: int = 32, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(code, 4 * width * 16), nn.Unflatten(1, (4 * width, 4, 4)),
        nn.BatchNorm2d(4 * width), nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(True),
        nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.GroupNorm(4, 2 * width), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(2 * width * 16, 1),
    )  # fmt: skip


@program
def wasserstein(training: Training) -> dict[str, Any]:
    """A penalty of the critic's gradient between real and drawn images; two steps of the critic for one."""
    g, d = generator(), critic()
    of_g, of_d = (torch.optim.Adam(m.parameters(), 1e-4, (0.0, 0.9)) for m in (g, d))

    def critic_loss(d: nn.Module, real: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        mix = torch.rand(real.shape[0], 1, 1, 1)
        between = (mix * real + (1 - mix) * drawn).requires_grad_(True)
        scores = d(between)
        gradient = torch.autograd.grad(
            scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True, only_inputs=True
        )[0]
        penalty = ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return d(drawn).mean() - d(real).mean() + 10 * penalty

    def generator_loss(g: nn.Module, d: nn.Module, code: torch.Tensor) -> torch.Tensor:
        return -d(g(code)).mean()

    of_critic, of_generator = training.step(critic_loss), training.step(generator_loss)
    losses = []
    for _ in range(2):
        for _ in range(2):
            real = torch.rand(8, 3, 16, 16) * 2 - 1
            with torch.no_grad():
                drawn = g(torch.randn(8, 32))
            of_d.zero_grad()

            def critic_step(real: torch.Tensor = real, drawn: torch.Tensor = drawn) -> torch.Tensor:
                loss = of_critic(d, real, drawn)
                loss.backward()
                return loss.detach()

            losses.append(training.run(of_critic, critic_step))
            of_d.step()
        code = torch.randn(8, 32)
        of_g.zero_grad()

        def generator_step(code: torch.Tensor = code) -> torch.Tensor:
            loss = of_generator(g, d, code)
            loss.backward()
            return loss.detach()

        losses.append(training.run(of_generator, generator_step))
        of_g.step()
    return {"losses": losses, "generator": g, "critic": d, "optimizers": [of_g, of_d]}


@program
def adversaries_in_one_loop(training: Training) -> dict[str, Any]:
    """Both modules by auto_checkpoint, losses in the loop, the drawn images detached for the critic; R1."""
    g, d = training.model(generator()), training.model(critic())
    mean = copy.deepcopy(g)
    of_g, of_d = (torch.optim.Adam(m.parameters(), 2e-4, (0.5, 0.999)) for m in (g, d))
    losses = []
    for number in range(4):
        real = (torch.rand(8, 3, 16, 16) * 2 - 1).requires_grad_(number % 2 == 1)

        def critic_step(real: torch.Tensor = real) -> tuple[torch.Tensor, torch.Tensor]:
            drawn = g(torch.randn(8, 32))
            scores = d(real)
            loss = F.softplus(d(drawn.detach())).mean() + F.softplus(-scores).mean()
            if real.requires_grad:
                (gradient,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
                loss = loss + 5 * gradient.square().sum((1, 2, 3)).mean()
            of_d.zero_grad()
            loss.backward()
            of_d.step()
            of_g.zero_grad()
            other = F.softplus(-d(drawn)).mean()
            other.backward()
            return loss.detach(), other.detach()

        losses.append(training.run(d, critic_step))
        of_g.step()
        average(mean, g)
    return {"losses": losses, "generator": g, "critic": d, "mean": mean, "optimizers": [of_g, of_d]}


class Codebook(nn.Module):
    """Vectors that follow what was assigned to them; those that nobody chooses are drawn anew."""

    def __init__(self, size: int = 64, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(size, width))
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", self.vectors.clone())

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.vectors.t() + self.vectors.pow(2).sum(1)
        index = distance.argmin(1)
        chosen = F.embedding(index, self.vectors)
        quantised = chosen.view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, self.counts.numel()).type_as(flat)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ flat, alpha=0.1)
                total = self.counts.sum()
                smooth = (self.counts + 1e-5) / (total + self.counts.numel() * 1e-5) * total
                self.vectors.copy_(self.sums / smooth[:, None])
                dead = self.counts < 0.5
                if dead.any():
                    drawn = flat[torch.randint(0, flat.shape[0], (int(dead.sum()),))]
                    self.vectors[dead] = drawn
                    self.sums[dead], self.counts[dead] = drawn, 1.0
        commitment = F.mse_loss(z, quantised.detach())
        return z + (quantised - z).detach(), commitment, index


class VQVAE(nn.Module):
    def __init__(self, width: int = 32, code: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, code, 1),
        )  # fmt: skip
        self.codebook = Codebook(width=code)
        self.decoder = nn.Sequential(
            nn.Conv2d(code, width, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        quantised, commitment, index = self.codebook(self.encoder(x))
        return self.decoder(quantised), commitment, index


@program
def vq_vae(training: Training) -> dict[str, Any]:
    """Gradients straight through, a codebook in buffers that follows and is drawn anew."""
    model = VQVAE()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)

    def train_step(model: nn.Module, image: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn, commitment, index = model(image)
        used = index.bincount(minlength=64).ne(0).sum()
        return {"loss": F.mse_loss(drawn, image) + 0.25 * commitment, "used": used}

    train_step = training.step(train_step)
    losses = []
    for _ in range(4):
        image = torch.randn(8, 3, 16, 16)
        optimizer.zero_grad()

        def step(image: torch.Tensor = image) -> tuple[torch.Tensor, torch.Tensor]:
            output = train_step(model, image)
            output["loss"].backward()
            return output["loss"].detach(), output["used"]

        losses.append(training.run(train_step, step))
        optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class Denoiser(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = mlp(32, 64, 64)
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.Conv2d(3 * width, width, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, 2 * width), nn.GroupNorm(8, width)])
        self.middle, self.scale = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.Linear(64, 4 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        waves = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(16) / 16)
        scale, shift = self.scale(self.time(torch.cat([waves.sin(), waves.cos()], 1))).chunk(2, 1)
        first = self.enter(x)
        h = self.norms[0](self.down(first)) * (1 + scale[..., None, None]) + shift[..., None, None]
        h = h + self.middle(self.dropout(F.silu(h)))
        words = h.flatten(2).transpose(1, 2)
        h = h + self.attention(words, words, words, need_weights=False)[0].transpose(1, 2).view_as(h)
        h = torch.cat([F.interpolate(h, scale_factor=2.0), first], 1)
        return self.leave(F.silu(self.norms[1](self.up(h))))


@program
def diffusion(training: Training) -> dict[str, Any]:
    """Noise and times drawn in the step, bf16, weights by signal to noise, accumulation, an average."""
    model = Denoiser()
    mean = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

    def train_step(model: nn.Module, image: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, 1000, (image.shape[0],))
        noise = torch.randn_like(image)
        signal = kept[t][:, None, None, None]
        noisy = signal.sqrt() * image + (1 - signal).sqrt() * noise
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(noisy, t)
        ratio = (kept / (1 - kept))[t]
        weight = torch.minimum(ratio, torch.full_like(ratio, 5)) / ratio
        return (F.mse_loss(predicted.float(), noise, reduction="none").mean((1, 2, 3)) * weight).mean() / 2

    train_step = training.step(train_step)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            image = torch.randn(4, 3, 16, 16)

            def step(image: torch.Tensor = image) -> torch.Tensor:
                loss = train_step(model, image, kept)
                loss.backward()
                return loss.detach()

            losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average(mean, model)
    return {"losses": losses, "model": model, "mean": mean, "optimizer": optimizer}
