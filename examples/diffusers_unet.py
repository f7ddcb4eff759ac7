"""Training a denoiser as the scripts of diffusers do, within a memory budget: the loss is outside the model.

python examples/diffusers_unet.py --budget 60%
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel

import planner


def build_model() -> UNet2DModel:
    """A U-Net of two levels, dropout on; the same weights every time."""
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, dropout=0.1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )  # fmt: skip


def denoise(
    model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The loss of one batch."""
    return F.mse_loss(model(noisy, timesteps).sample, noise)


def train(budget: str | None, steps: int = 4, solver: str = "auto") -> torch.nn.Module:
    """Train for some steps; without a plan where the budget is None."""
    accelerator = Accelerator(cpu=True)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = denoise if budget is None else planner.step(denoise, budget=budget, solver=solver)
    scheduler = DDPMScheduler(num_train_timesteps=100)
    torch.manual_seed(1)
    for _ in range(steps):
        images = torch.randn(4, 3, 16, 16)
        noise, timesteps = torch.randn_like(images), torch.randint(0, 100, (len(images),))
        loss = step(model, scheduler.add_noise(images, noise, timesteps), timesteps, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    train(given.budget, given.steps)
