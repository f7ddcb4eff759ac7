"""Autoencoders, adversarial pairs, flows and fields, written with torch.nn."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import Built, images, in_zoo

_spectral_norm = torch.nn.utils.parametrizations.spectral_norm
_weight_norm = torch.nn.utils.parametrizations.weight_norm


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(4096, 32),
        )
        self.decode = nn.Sequential(
            nn.Linear(16, 4096), nn.Unflatten(1, (16, 16, 16)), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        seen = self.decode(drawn)
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return {"loss": F.mse_loss(seen, x) + divergence, "seen": seen, "mean": mean}


@in_zoo
def nn_vae() -> Built:
    return VAE(), (images(8),), {}


class VQVAE(nn.Module):
    """Discrete codes with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 16, 3, 1, 1))
        self.codes = nn.Embedding(64, 16)
        self.decode = nn.Sequential(nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(z.flatten(0, 2), self.codes.weight).argmin(1)
        q = self.codes(nearest).view_as(z)
        commitment = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        seen = self.decode((z + (q - z).detach()).permute(0, 3, 1, 2))
        return F.mse_loss(seen, x) + commitment


@in_zoo
def nn_vqvae() -> Built:
    return VQVAE(), (images(4),), {}


def _discriminator() -> nn.Module:
    return nn.Sequential(
        _spectral_norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True),
        _spectral_norm(nn.Conv2d(16, 32, 4, 2, 1)), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(), nn.Linear(32 * 64, 1),
    )  # fmt: skip


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 32 * 64), nn.Unflatten(1, (32, 8, 8)), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


@in_zoo
def nn_gan_discriminator() -> Built:
    return _discriminator(), (images(8),), {}


@in_zoo
def nn_gan_generator() -> Built:
    return _generator(), (torch.randn(8, 32),), {}


class GANPair(nn.Module):
    """Generator and discriminator in one step: the discriminator runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = _generator(), _discriminator()

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        return F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()


@in_zoo
def nn_gan_pair() -> Built:
    return GANPair(), (torch.randn(4, 32), images(4)), {}


class Coupling(nn.Module):
    """An affine coupling layer of a normalising flow."""

    def __init__(self, width: int, flip: bool) -> None:
        super().__init__()
        self.flip, half = flip, width // 2
        self.net = nn.Sequential(nn.Linear(half, 128), nn.ReLU(), nn.Linear(128, 2 * half))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, -1)
        scale = torch.tanh(scale)
        b = b * scale.exp() + shift
        return torch.cat((b, a) if self.flip else (a, b), -1), scale.sum(-1)


class Flow(nn.Module):
    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(width, bool(i % 2)) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        volume = torch.zeros(len(x))
        for layer in self.layers:
            x, change = layer(x)
            volume = volume + change
        return (0.5 * x.square().sum(-1) - volume).mean()


@in_zoo
def nn_flow() -> Built:
    return Flow(), (torch.randn(256, 32),), {}


class Field(nn.Module):
    """A radiance field: positions as sines, densities summed along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, points: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
        angles = points[..., None] * 2.0 ** torch.arange(6) * math.pi
        encoded = torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)
        density, colour = self.net(encoded).split((1, 3), -1)
        opacity = 1 - torch.exp(-F.softplus(density) * 0.1)
        through = torch.cumprod(1 - opacity + 1e-6, 1)
        seen = (opacity * through * colour.sigmoid()).sum(1)
        return F.mse_loss(seen, colours)


@in_zoo
def nn_radiance_field() -> Built:
    return Field(), (torch.randn(128, 16, 3), torch.rand(128, 3)), {}


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(30 * x)


@in_zoo
def nn_sine_network() -> Built:
    return (
        nn.Sequential(nn.Linear(2, 128), Sine(), nn.Linear(128, 128), Sine(), nn.Linear(128, 1)),
        (torch.randn(512, 2),),
        {},
    )


class Ode(nn.Module):
    """Eight steps of Runge-Kutta through a small network: the same weights 32 times."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            a = self.speed(x)
            b = self.speed(x + a / 16)
            c = self.speed(x + b / 16)
            d = self.speed(x + c / 8)
            x = x + (a + 2 * b + 2 * c + d) / 48
        return x.square().mean()


@in_zoo
def nn_ode() -> Built:
    return Ode(), (torch.randn(128, 16),), {}


class Gumbel(nn.Module):
    """Samples discrete codes with the Gumbel softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 8 * 16), nn.Linear(8 * 16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = F.gumbel_softmax(self.encode(x).view(-1, 8, 16), tau=0.7, hard=True)
        return F.mse_loss(self.decode(codes.flatten(1)), x)


@in_zoo
def nn_gumbel() -> Built:
    return Gumbel(), (torch.randn(512, 64),), {}


class Denoiser(nn.Module):
    """A step of denoising diffusion: draws noise and times itself."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 32)
        self.inward, self.middle, self.outward = (
            nn.Conv2d(3, 32, 3, 1, 1),
            nn.Conv2d(32, 32, 3, 1, 1),
            nn.Conv2d(32, 3, 3, 1, 1),
        )
        self.norm = nn.GroupNorm(8, 32)
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = torch.randint(0, 100, (len(x),))
        noise, kept = torch.randn_like(x), self.kept[time][:, None, None, None]
        y = kept.sqrt() * x + (1 - kept).sqrt() * noise
        hidden = F.silu(self.norm(self.inward(y) + self.time(time)[:, :, None, None]))
        return F.mse_loss(self.outward(F.silu(self.middle(hidden)) + hidden), noise)


@in_zoo
def nn_denoiser() -> Built:
    return Denoiser(), (images(4),), {}


@in_zoo
def nn_weight_norm() -> Built:
    layers = [
        _weight_norm(nn.Conv1d(8, 32, 3, padding=1)),
        nn.ReLU(),
        _weight_norm(nn.Conv1d(32, 32, 3, padding=1)),
    ]
    return (
        nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 128, 4)),
        (torch.randn(8, 8, 128),),
        {},
    )
