"""Networks whose weights are computed: learning to learn, and networks that make networks."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

from benchmarks.users.training import Training, mlp, program


def convolutional(width: int = 16, classes: int = 5) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Conv2d(width if i else 1, width, 3, padding=1)]
        layers += [nn.BatchNorm2d(width, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 4, classes))


@program
def maml(training: Training) -> dict[str, Any]:
    """Steps within the step: functional_call by weights that gradients with a graph have moved."""
    model = convolutional()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def outer_loss(
        model: nn.Module, support: torch.Tensor, query: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        losses = []
        for s, q in zip(support, query, strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(model, weights, (s,)), labels)
                gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
            losses.append(F.cross_entropy(functional_call(model, weights, (q,)), labels))
        return torch.stack(losses).mean()

    train_step = training.step(outer_loss)
    labels = torch.arange(5).repeat(4)
    losses = []
    for _ in range(3):
        support, query = torch.randn(2, 20, 1, 16, 16), torch.randn(2, 20, 1, 16, 16)
        optimizer.zero_grad()

        def step(support: torch.Tensor = support, query: torch.Tensor = query) -> torch.Tensor:
            loss = train_step(model, support, query, labels)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class HyperNetwork(nn.Module):
    """Makes the weights of a network of sines from a few samples of a signal."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.target = mlp(2, width, width, 3, activation=nn.Tanh).requires_grad_(False)
        self.shapes = {name: p.shape for name, p in self.target.named_parameters()}
        self.encoder = nn.Sequential(nn.Linear(5, 128), nn.GELU(), nn.Linear(128, 128))
        self.heads = nn.ModuleDict(
            {name.replace(".", "_"): nn.Linear(128, shape.numel()) for name, shape in self.shapes.items()}
        )

    def forward(self, context: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        codes = self.encoder(context).mean(1)
        drawn = []
        for code in codes:
            made = {
                name: getattr_of(self.target, name)
                + 0.1 * self.heads[name.replace(".", "_")](code).view(shape)
                for name, shape in self.shapes.items()
            }
            drawn.append(functional_call(self.target, made, (places,)))
        return torch.stack(drawn)


def getattr_of(module: nn.Module, name: str) -> torch.Tensor:
    parameter: torch.Tensor = module.get_parameter(name)
    return parameter


@program
def hypernetwork(training: Training) -> dict[str, Any]:
    """Frozen weights with what another network adds to them, by functional_call, sample by sample."""
    model = HyperNetwork()
    optimizer = torch.optim.RAdam(model.heads.parameters(), 1e-3)
    optimizer.add_param_group({"params": model.encoder.parameters(), "lr": 5e-4})

    def train_step(
        model: HyperNetwork, context: torch.Tensor, places: torch.Tensor, colours: torch.Tensor
    ) -> torch.Tensor:
        drawn = model(context, places)
        made = sum(head.weight.square().mean() for head in model.heads.values())
        return F.mse_loss(drawn, colours) + 1e-3 * made

    train_step = training.step(train_step)
    losses = []
    for _ in range(3):
        data = torch.randn(6, 40, 5), torch.rand(300, 2) * 2 - 1, torch.rand(6, 300, 3)
        optimizer.zero_grad()

        def step(data: tuple[torch.Tensor, ...] = data) -> torch.Tensor:
            loss = train_step(model, *data)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}
