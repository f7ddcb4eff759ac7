"""Models of a fixed point or a differential equation, whose backward is written by their users."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, mlp, program


class Cell(nn.Module):
    """A residual block, injected with the input."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        for convolution in (self.first, self.second):
            nn.init.normal_(convolution.weight, std=0.01)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](F.relu(self.first(z)))
        return self.norms[2](F.relu(z + self.norms[1](x + self.second(y))))


def anderson(
    f: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, memory: int = 3, most: int = 8
) -> torch.Tensor:
    """A fixed point by Anderson's acceleration, until it moves little."""
    batch, size = start.shape[0], start[0].numel()
    xs, fs = (start.new_zeros(batch, memory, size) for _ in range(2))
    xs[:, 0], fs[:, 0] = start.flatten(1), f(start).flatten(1)
    xs[:, 1], fs[:, 1] = fs[:, 0], f(fs[:, 0].view_as(start)).flatten(1)
    h = start.new_zeros(batch, memory + 1, memory + 1)
    h[:, 0, 1:] = h[:, 1:, 0] = 1
    y = start.new_zeros(batch, memory + 1, 1)
    y[:, 0] = 1
    for k in range(2, most):
        n = min(k, memory)
        g = fs[:, :n] - xs[:, :n]
        h[:, 1 : n + 1, 1 : n + 1] = torch.bmm(g, g.transpose(1, 2)) + 1e-4 * torch.eye(n)
        alpha = torch.linalg.solve(h[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
        xs[:, k % memory] = (alpha[:, None] @ fs[:, :n])[:, 0]
        fs[:, k % memory] = f(xs[:, k % memory].view_as(start)).flatten(1)
        moved = (fs[:, k % memory] - xs[:, k % memory]).norm() / (1e-5 + fs[:, k % memory].norm())
        if moved.item() < 1e-2:
            break
    return xs[:, k % memory].view_as(start)


class DeepEquilibrium(nn.Module):
    """A fixed point without gradients, one call with them, and a hook that solves the backward."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.cell = Cell(width)
        self.head = nn.Sequential(
            nn.BatchNorm2d(width), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(width * 9, 10)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        with torch.no_grad():
            z = anderson(lambda z: self.cell(z, x), torch.zeros_like(x))
        z = self.cell(z, x)
        if self.training:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.cell(z0, x)

            def hook(gradient: torch.Tensor) -> torch.Tensor:
                return anderson(
                    lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + gradient, gradient
                )

            z.register_hook(hook)
        return self.head(z)


@program
def deep_equilibrium(training: Training) -> dict[str, Any]:
    """A backward hook that solves for the gradient by the graph of a second call."""
    model = DeepEquilibrium()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=1e-6)

    def train_step(model: nn.Module, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(image), label)

    train_step = training.step(train_step)
    losses = []
    for _ in range(3):
        image, label = torch.randn(8, 3, 12, 12), torch.randint(0, 10, (8,))
        optimizer.zero_grad()

        def step(image: torch.Tensor = image, label: torch.Tensor = label) -> torch.Tensor:
            loss = train_step(model, image, label)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class Derivative(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = mlp(width + 1, 64, 64, width, activation=nn.Tanh)
        self.calls = 0

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(torch.cat([y, t.expand(*y.shape[:-1], 1)], -1))


def runge_kutta(
    f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], y: torch.Tensor, times: torch.Tensor
) -> torch.Tensor:
    """The states at all times, by the classic method."""
    states = [y]
    for t0, t1 in itertools.pairwise(times):
        h = t1 - t0
        k1 = f(t0, y)
        k2 = f(t0 + h / 2, y + h * k1 / 2)
        k3 = f(t0 + h / 2, y + h * k2 / 2)
        k4 = f(t1, y + h * k3)
        y = y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        states.append(y)
    return torch.stack(states)


@program
def neural_ode(training: Training) -> dict[str, Any]:
    """Backward through the solver; a latent start that is drawn; calls are counted; RMSprop."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.GRU(4, 32, batch_first=True)
            self.start, self.derivative, self.decoder = nn.Linear(32, 64), Derivative(), mlp(32, 32, 4)

        def forward(self, seen: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, ...]:
            _, hidden = self.encoder(seen.flip(1))
            mean, log_variance = self.start(hidden[0]).chunk(2, -1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            states = runge_kutta(self.derivative, z, times)
            return self.decoder(states).transpose(0, 1), mean, log_variance

    model = Latent()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.9)

    def train_step(model: nn.Module, seen: torch.Tensor, times: torch.Tensor, beta: float) -> torch.Tensor:
        drawn, mean, log_variance = model(seen, times)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(drawn, seen) + beta * divergence

    train_step = training.step(train_step)
    times = torch.linspace(0, 1, 8)
    losses = []
    for number in range(4):
        seen = torch.randn(32, 8, 4)
        optimizer.zero_grad()

        def step(seen: torch.Tensor = seen, beta: float = number / 10) -> torch.Tensor:
            loss = train_step(model, seen, times, beta)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    calls = torch.tensor(model.derivative.calls)
    return {"losses": losses, "model": model, "optimizer": optimizer, "calls": calls}


class Adjoint(torch.autograd.Function):
    """Solves the equation backwards, with derivatives of the network by autograd.grad."""

    @staticmethod
    def forward(ctx: Any, f: Derivative, steps: int, y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, steps + 1)
        with torch.no_grad():
            end = runge_kutta(f, y, times)[-1]
        ctx.f, ctx.times = f, times
        ctx.save_for_backward(end, *weights)
        return end

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        y, *weights = ctx.saved_tensors
        sums = [torch.zeros_like(w) for w in weights]
        for t0, t1 in itertools.pairwise(ctx.times.flip(0)):
            with torch.enable_grad():
                at = y.detach().requires_grad_(True)
                rate = ctx.f(t0, at)
            found = torch.autograd.grad(rate, (at, *weights), gradient, allow_unused=True)
            h = t0 - t1
            y = y - h * rate.detach()
            gradient = gradient + h * found[0]
            sums = [s + h * g if g is not None else s for s, g in zip(sums, found[1:], strict=True)]
        return (None, None, gradient, *sums)


@program
def adjoint_ode(training: Training) -> dict[str, Any]:
    """A function of autograd whose backward runs the network again, and hands out weights' gradients."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.derivative = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32)), Derivative()
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            return self.head(Adjoint.apply(self.derivative, 6, y, *self.derivative.parameters()))

    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)

    def train_step(model: nn.Module, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), label, label_smoothing=0.1)

    train_step = training.step(train_step)
    losses = []
    for _ in range(3):
        x, label = torch.randn(128, 20), torch.randint(0, 10, (128,))
        optimizer.zero_grad()

        def step(x: torch.Tensor = x, label: torch.Tensor = label) -> torch.Tensor:
            loss = train_step(model, x, label)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        optimizer.step()
    calls = torch.tensor(model.derivative.calls)
    return {"losses": losses, "model": model, "optimizer": optimizer, "calls": calls}
