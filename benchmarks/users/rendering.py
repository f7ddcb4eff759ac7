"""Gaussian splats and radiance fields: rendering in PyTorch, and parameters that are replaced on the way."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, mlp, program


class Splats(nn.Module):
    """Gaussians in space, drawn on a plane from far to near."""

    def __init__(self, count: int = 150) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.rand(count, 3) * 2 - 1)
        self.scales = nn.Parameter(torch.full((count, 3), -2.0))
        self.quaternions = nn.Parameter(torch.randn(count, 4))
        self.opacities = nn.Parameter(torch.zeros(count))
        self.colours = nn.Parameter(torch.rand(count, 3))

    def forward(self, camera: torch.Tensor, side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
        w, x, y, z = F.normalize(self.quaternions, dim=-1).unbind(-1)
        rotation = torch.stack(
            [
                1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
                2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
            ],
            -1,
        ).view(-1, 3, 3)  # fmt: skip
        half = rotation * self.scales.exp()[:, None]
        covariance = half @ half.transpose(1, 2)
        seen = self.means @ camera[:3, :3].T + camera[:3, 3]
        depth, order = (seen[:, 2] + 4).sort()
        flat = seen[order, :2] / depth[:, None] * 3
        flat.retain_grad()
        projected = camera[:2, :3] @ covariance[order] @ camera[:2, :3].T
        inverse = torch.linalg.inv(projected + 0.003 * torch.eye(2))
        line = torch.linspace(-1, 1, side)
        pixels = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).view(-1, 1, 2)
        offsets = pixels - flat
        power = -0.5 * torch.einsum("pgi,gij,pgj->pg", offsets, inverse, offsets)
        alpha = (torch.sigmoid(self.opacities[order]) * power.exp()).clamp(max=0.99)
        alpha = torch.where(alpha > 1 / 255, alpha, torch.zeros_like(alpha))
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        image = (alpha * through) @ self.colours[order]
        return image.view(side, side, 3), flat


def camera_at(angle: float) -> torch.Tensor:
    """A camera that looks at the origin."""
    sine, cosine = torch.sin(torch.tensor(angle)), torch.cos(torch.tensor(angle))
    pose = torch.eye(4)
    pose[0, 0], pose[0, 2], pose[2, 0], pose[2, 2] = cosine, sine, -sine, cosine
    return pose


def densify(model: Splats, optimizer: torch.optim.Optimizer, gradients: torch.Tensor) -> None:
    """Clone what moves most, prune what is faint; the optimizer goes on with the states of what is left."""
    chosen = gradients > gradients.quantile(0.8)
    kept = torch.sigmoid(model.opacities.detach()) > 0.499
    for group in optimizer.param_groups:
        (old,) = group["params"]
        new = nn.Parameter(torch.cat([old.detach()[kept], old.detach()[chosen]]))
        state = optimizer.state.pop(old)
        for name in ("exp_avg", "exp_avg_sq"):
            added = torch.zeros_like(state[name][chosen])
            state[name] = torch.cat([state[name][kept], added])
        group["params"] = [new]
        optimizer.state[new] = state
        setattr(model, group["name"], new)


@program
def gaussian_splats(training: Training) -> dict[str, Any]:
    """A group of Adam for each parameter; gradients of a result; other parameters every other step."""
    model = Splats()
    rates = {"means": 1e-3, "scales": 5e-3, "quaternions": 1e-3, "opacities": 5e-2, "colours": 2.5e-3}
    optimizer = torch.optim.Adam(
        [{"params": [getattr(model, n)], "lr": rate, "name": n} for n, rate in rates.items()], eps=1e-15
    )

    def render_loss(model: Splats, camera: torch.Tensor, image: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn, flat = model(camera)
        window = torch.ones(3, 1, 5, 5) / 25
        a, b = drawn.permute(2, 0, 1)[None], image.permute(2, 0, 1)[None]
        ma, mb = F.conv2d(a, window, groups=3), F.conv2d(b, window, groups=3)
        va, vb = F.conv2d(a * a, window, groups=3) - ma**2, F.conv2d(b * b, window, groups=3) - mb**2
        both = F.conv2d(a * b, window, groups=3) - ma * mb
        ssim = (2 * ma * mb + 1e-4) * (2 * both + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
        return {"loss": 0.8 * F.l1_loss(drawn, image) + 0.2 * (1 - ssim.mean()), "flat": flat}

    train_step = training.step(render_loss)
    images = torch.rand(3, 24, 24, 3)
    losses = []
    for number in range(5):

        def step(number: int = number) -> torch.Tensor:
            output = train_step(model, camera_at(0.4 * number), images[number % 3])
            output["loss"].backward()
            return output["loss"].detach()

        losses.append(training.run(train_step, step, sizes_vary=True))
        moved = model.means.grad.norm(dim=-1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % 2:
            densify(model, optimizer, moved)
    return {"losses": losses, "model": model, "optimizer": optimizer}


class Radiance(nn.Module):
    """A radiance field on a hash grid, rendered along rays with samples drawn at random."""

    def __init__(self, levels: int = 4, table: int = 2**10) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(table, 2) for _ in range(levels))
        for embedding in self.tables:
            nn.init.uniform_(embedding.weight, -1e-1, 1e-1)
        self.size = table
        self.density, self.colour = mlp(2 * levels, 32, 16, activation=nn.ReLU), mlp(19, 32, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for level, embedding in enumerate(self.tables):
            scaled = (x + 1) * 4 * 1.5**level
            corner, part = scaled.floor().long(), scaled - scaled.floor()
            total = x.new_zeros(x.shape[0], 2)
            for i in range(8):
                step = torch.tensor([i & 1, i >> 1 & 1, i >> 2])
                at = corner + step
                place = (at[:, 0] ^ at[:, 1] * 2654435761 ^ at[:, 2] * 805459861) % self.size
                weight = torch.where(step.bool(), part, 1 - part).prod(-1, keepdim=True)
                total = total + weight * embedding(place)
            found.append(total)
        return torch.cat(found, -1)

    def forward(self, origins: torch.Tensor, directions: torch.Tensor, samples: int = 16) -> torch.Tensor:
        t = torch.linspace(0.5, 3, samples) + torch.rand(origins.shape[0], samples) * 2.5 / samples
        points = origins[:, None] + directions[:, None] * t[..., None]
        hidden = self.density(self.encode(points.flatten(0, 1)))
        sigma = F.softplus(hidden[:, 0]).view(-1, samples)
        along = directions[:, None].expand(-1, samples, -1).flatten(0, 1)
        rgb = torch.sigmoid(self.colour(torch.cat([hidden, along], -1))).view(-1, samples, 3)
        distance = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], 1)
        alpha = 1 - torch.exp(-sigma * distance)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * through)[..., None] * rgb).sum(1)


@program
def radiance_field(training: Training) -> dict[str, Any]:
    """A hash grid, samples along rays from the generator, products of what is let through, two rates."""
    model = Radiance()
    optimizer = torch.optim.Adam(
        [
            {"params": model.tables.parameters(), "lr": 1e-2},
            {"params": [*model.density.parameters(), *model.colour.parameters()], "weight_decay": 1e-6},
        ],
        lr=1e-3, betas=(0.9, 0.99), eps=1e-15,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train_step(model: nn.Module, rays: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(model(rays[:, :3], F.normalize(rays[:, 3:], dim=-1)), pixels, delta=0.1)

    train_step = training.step(train_step)
    losses = []
    for _ in range(4):
        rays, pixels = torch.randn(256, 6), torch.rand(256, 3)
        optimizer.zero_grad()

        def step(rays: torch.Tensor = rays, pixels: torch.Tensor = pixels) -> torch.Tensor:
            loss = train_step(model, rays, pixels)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}
