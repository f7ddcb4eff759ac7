"""Neural operators and networks that know physics: transforms, derivatives of the network, LBFGS."""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, mlp, program


class SpectralConvolution(nn.Module):
    """A product with complex weights of the lowest modes."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / width**2
        self.low = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, f = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(f)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    def __init__(self, width: int = 24, modes: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.spectral = nn.ModuleList(SpectralConvolution(width, modes) for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.InstanceNorm2d(width) for _ in range(layers))
        self.head = nn.Sequential(nn.Conv2d(width, 64, 1), nn.GELU(), nn.Conv2d(64, 1, 1))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        n = a.shape[-1]
        line = torch.linspace(0, 1, n, device=a.device)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij")).expand(a.shape[0], 2, n, n)
        x = F.pad(self.lift(torch.cat([a, grid], 1)), [0, 9, 0, 9])
        for spectral, local, norm in zip(self.spectral, self.local, self.norms, strict=True):
            x = F.gelu(norm(spectral(x)) + local(x))
        return self.head(x[..., :-9, :-9])


@program
def fno(training: Training) -> dict[str, Any]:
    """Complex weights, relative losses, one cycle of the rate, a rollout of two steps in the second half."""
    model = FNO()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)

    def train_step(model: nn.Module, a: torch.Tensor, u: torch.Tensor, rollout: int) -> torch.Tensor:
        loss = a.new_zeros(())
        for _ in range(rollout):
            a = model(a)
            wrong = torch.linalg.vector_norm((a - u).flatten(1), dim=1)
            loss = loss + (wrong / torch.linalg.vector_norm(u.flatten(1), dim=1)).mean()
        return loss

    train_step = training.step(train_step)
    a, u = torch.randn(4, 1, 32, 32), torch.randn(4, 1, 32, 32)
    losses = []
    for number in range(6):
        optimizer.zero_grad()

        def step(rollout: int = 1 if number < 3 else 2) -> torch.Tensor:
            loss = train_step(model, a, u, rollout)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step, sizes_vary=True))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class DeepONet(nn.Module):
    def __init__(self, sensors: int = 64, width: int = 128) -> None:
        super().__init__()
        self.branch = mlp(sensors, width, width, width, activation=nn.ReLU)
        self.trunk = mlp(2, width, width, width, activation=nn.Tanh)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bw,pw->bp", self.branch(u), self.trunk(y)) + self.bias


@program
def deeponet(training: Training) -> dict[str, Any]:
    """A module by auto_checkpoint, the loss in the loop; batches of another size at the end."""
    model = training.model(DeepONet())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    losses = []
    for size in (64, 64, 64, 40):
        u, y, s = torch.randn(size, 64), torch.rand(500, 2), torch.randn(size, 500)
        optimizer.zero_grad()

        def step(u: torch.Tensor = u, y: torch.Tensor = y, s: torch.Tensor = s) -> torch.Tensor:
            loss = F.mse_loss(model(u, y), s)
            loss.backward()
            return loss.detach()

        losses.append(training.run(model, step, sizes_vary=True))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class Field(nn.Module):
    """A solution of an equation, with random Fourier features and a coefficient that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 32))
        self.net = mlp(64, 64, 64, 64, 1, activation=nn.Tanh)
        self.viscosity = nn.Parameter(torch.tensor(-3.0))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        waves = torch.cat([x, t], 1) @ self.frequencies
        return self.net(torch.cat([waves.sin(), waves.cos()], 1))


def burgers(model: Field, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The residual of Burgers' equation, by second derivatives of the network."""
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(x, t)
    ones = torch.ones_like(u)
    u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
    return u_t + u * u_x - model.viscosity.exp() * u_xx


@program
def pinn(training: Training) -> dict[str, Any]:
    """Adam first, then LBFGS, whose closure runs the step several times; weights of losses that adapt."""
    model = Field()
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=5, line_search_fn="strong_wolfe")

    def pinn_loss(
        model: Field, inside: torch.Tensor, start: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        residual = burgers(model, inside[:, :1].clone(), inside[:, 1:].clone())
        initial = model(start, torch.zeros_like(start)) + torch.sin(math.pi * start)
        return residual.square().mean() + weight * initial.square().mean()

    train_step = training.step(pinn_loss)
    inside, start = torch.rand(400, 2) * 2 - 1, torch.rand(100, 1) * 2 - 1
    weight = torch.tensor(1.0)
    losses = []

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()

        def step() -> torch.Tensor:
            loss = train_step(model, inside, start, weight)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        return losses[-1]

    for _ in range(3):
        closure()
        adam.step()
        weight = 0.9 * weight + 0.1 * losses[-1]
    lbfgs.step(closure)
    return {"losses": losses, "model": model, "optimizers": [adam, lbfgs]}
