"""Force fields: energies of molecules, and forces as their gradients, which the loss differentiates again."""

import copy
import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, average, mlp, program

Graph = dict[str, torch.Tensor]


def molecules(count: int = 8, atoms: int = 12) -> Graph:
    """A batch of molecules as one graph, with the energies and forces that a calculation gave."""
    total = count * atoms
    batch = torch.arange(count).repeat_interleave(atoms)
    positions = torch.randn(total, 3) * 1.5
    near = (torch.cdist(positions, positions) < 3.0) & (batch[:, None] == batch[None])
    near.fill_diagonal_(False)
    receivers, senders = near.nonzero(as_tuple=True)
    return {
        "z": torch.randint(1, 9, (total,)),
        "pos": positions,
        "batch": batch,
        "edge_index": torch.stack([senders, receivers]),
        "energy": torch.randn(count),
        "force": torch.randn(total, 3),
    }


def bessel(distances: torch.Tensor, count: int, cutoff: float = 3.0) -> torch.Tensor:
    """Radial functions with a smooth end."""
    waves = torch.arange(1, count + 1, device=distances.device) * math.pi / cutoff
    smooth = 0.5 * (torch.cos(distances * math.pi / cutoff) + 1)
    return torch.sin(distances[:, None] * waves) / distances[:, None] * smooth[:, None]


class ShiftedSoftplus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x) - math.log(2.0)


class SchNet(nn.Module):
    """Continuous filters; returns energies and forces, as its users call it."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.register_buffer("centres", torch.linspace(0, 3, 25))
        act = ShiftedSoftplus
        self.filters = nn.ModuleList(mlp(25, width, width, activation=act) for _ in range(layers))
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.after = nn.ModuleList(mlp(width, width, width, activation=act) for _ in range(layers))
        self.head = mlp(width, width // 2, 1, activation=act)

    def energy(self, graph: Graph) -> torch.Tensor:
        senders, receivers = graph["edge_index"]
        distances = (graph["pos"][receivers] - graph["pos"][senders]).norm(dim=-1)
        radial = torch.exp(-10.0 * (distances[:, None] - self.centres) ** 2)
        smooth = 0.5 * (torch.cos(distances * math.pi / 3.0) + 1)
        h = self.embedding(graph["z"])
        for filters, before, after in zip(self.filters, self.before, self.after, strict=True):
            messages = before(h)[senders] * (filters(radial) * smooth[:, None])
            h = h + after(torch.zeros_like(h).index_add_(0, receivers, messages))
        count = int(graph["energy"].shape[0])
        return torch.zeros(count).index_add_(0, graph["batch"], self.head(h).squeeze(-1))

    def forward(self, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
        positions = graph["pos"].requires_grad_()
        energy = self.energy(graph)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return energy, forces


@program
def schnet(training: Training) -> dict[str, Any]:
    """Forces by autograd.grad inside of the model, AdamW, clipping, a moving average, a plateau schedule."""
    model = SchNet()
    mean = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, amsgrad=True)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def train_step(model: nn.Module, graph: Graph) -> torch.Tensor:
        energy, forces = model(graph)
        return 0.05 * F.mse_loss(energy, graph["energy"]) + F.mse_loss(forces, graph["force"])

    train_step = training.step(train_step)
    data = molecules()
    losses = []
    for _ in range(4):
        batch = {name: value.clone() for name, value in data.items()}
        optimizer.zero_grad()

        def step(batch: Graph = batch) -> torch.Tensor:
            loss = train_step(model, batch)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step(losses[-1])
        average(mean, model)
    return {"losses": losses, "model": model, "mean": mean, "optimizer": optimizer}


class PaiNN(nn.Module):
    """Scalars and vectors that exchange messages."""

    def __init__(self, width: int = 48, layers: int = 3, radial: int = 16) -> None:
        super().__init__()
        self.width, self.radial = width, radial
        self.embedding = nn.Embedding(10, width)
        self.phi = nn.ModuleList(mlp(width, width, 3 * width) for _ in range(layers))
        self.filters = nn.ModuleList(nn.Linear(radial, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))
        self.update = nn.ModuleList(mlp(2 * width, width, 3 * width) for _ in range(layers))
        self.head = mlp(width, width // 2, 1)

    def forward(self, graph: Graph) -> torch.Tensor:
        senders, receivers = graph["edge_index"][0], graph["edge_index"][1]
        offsets = graph["pos"][receivers] - graph["pos"][senders]
        distances = torch.linalg.vector_norm(offsets, dim=-1)
        directions, radial = offsets / distances[:, None], bessel(distances, self.radial)
        s = self.embedding(graph["z"])
        v = s.new_zeros(s.shape[0], 3, self.width)
        for phi, filters, mix, update in zip(self.phi, self.filters, self.mix, self.update, strict=True):
            ds, dv, dr = (phi(s)[senders] * filters(radial)).split(self.width, dim=-1)
            vectors = v[senders] * dv[:, None] + directions[:, :, None] * dr[:, None]
            s = s + torch.zeros_like(s).scatter_add(0, receivers[:, None].expand_as(ds), ds)
            v = v + torch.zeros_like(v).index_add(0, receivers, vectors)
            u, w = mix(v).chunk(2, -1)
            norm = (w.square().sum(1) + 1e-8).sqrt()
            a, b, c = update(torch.cat([s, norm], -1)).chunk(3, -1)
            s = s + a + b * (u * w).sum(1)
            v = v + u * c[:, None]
        energies = self.head(s).squeeze(-1)
        return energies.new_zeros(graph["energy"].shape[0]).scatter_add_(0, graph["batch"], energies)


@program
def painn(training: Training) -> dict[str, Any]:
    """Forces in the loss, outside of the model; Huber losses, warmup, gradients of two batches added up."""
    model = PaiNN()
    optimizer = torch.optim.Adam(model.parameters(), 5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    def energy_and_forces(model: nn.Module, graph: Graph) -> torch.Tensor:
        graph["pos"].requires_grad_(True)
        energy = model(graph)
        (gradient,) = torch.autograd.grad(
            energy, graph["pos"], grad_outputs=torch.ones_like(energy), create_graph=True, retain_graph=True
        )
        return F.huber_loss(energy, graph["energy"]) + 100 * F.huber_loss(-gradient, graph["force"])

    train_step = training.step(energy_and_forces)
    batches = [molecules(6), molecules(6)]
    losses = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        for data in batches:
            batch = {name: value.clone() for name, value in data.items()}

            def step(batch: Graph = batch) -> torch.Tensor:
                loss = train_step(model, batch) / 2
                loss.backward()
                return loss.detach()

            losses.append(training.run(train_step, step, sizes_vary=True))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class Mace(nn.Module):
    """Products of spherical harmonics up to the first degree, contracted three times (MACE, NequIP)."""

    def __init__(self, width: int = 16, layers: int = 2, radial: int = 8) -> None:
        super().__init__()
        self.width, self.radial = width, radial
        self.embedding = nn.Linear(9, width, bias=False)
        self.weights = nn.ModuleList(mlp(radial, 32, 5 * width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2 * layers))
        self.products = nn.ParameterList(nn.Parameter(torch.randn(9, 4, width) / 2) for _ in range(layers))
        self.heads = nn.ModuleList([nn.Linear(width, 1), mlp(width, 16, 1)])
        antisymmetric = torch.zeros(3, 3, 3)
        for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
            antisymmetric[i, j, k], antisymmetric[j, i, k] = 1.0, -1.0
        self.register_buffer("cross", antisymmetric)
        self.register_buffer("atomic_energies", torch.randn(9))

    def forward(self, graph: Graph, training: bool = True) -> dict[str, torch.Tensor]:
        graph["pos"].requires_grad_(True)
        senders, receivers = graph["edge_index"]
        offsets = graph["pos"][receivers] - graph["pos"][senders]
        lengths = offsets.norm(dim=-1, keepdim=True)
        harmonics = math.sqrt(3) * offsets / lengths
        radial = bessel(lengths.squeeze(-1), self.radial)
        attributes = F.one_hot(graph["z"], 9).to(radial.dtype)
        s = self.embedding(attributes)
        v = s.new_zeros(s.shape[0], self.width, 3)
        energies = [attributes @ self.atomic_energies]
        for layer, (weights, product) in enumerate(zip(self.weights, self.products, strict=True)):
            w = weights(radial).view(-1, 5, self.width)
            hs, hv = self.up[2 * layer](s)[senders], v[senders]
            scalars = w[:, 0] * hs + w[:, 1] * torch.einsum("ecm,em->ec", hv, harmonics)
            vectors = (w[:, 2] * hs)[..., None] * harmonics[:, None]
            vectors = vectors + w[:, 3, :, None] * hv
            vectors = vectors + w[:, 4, :, None] * torch.einsum("eci,ej,ijk->eck", hv, harmonics, self.cross)
            a = torch.zeros_like(s).index_add(0, receivers, scalars) / 6.0
            b = torch.zeros_like(v).index_add(0, receivers, vectors) / 6.0
            c = torch.einsum("nz,zpc->npc", attributes, product)
            norms = b.square().sum(-1)
            s = self.up[2 * layer + 1](c[:, 0] * a + c[:, 1] * a * a + c[:, 2] * norms + c[:, 3] * a * norms)
            v = b * (c[:, 0] + c[:, 1] * a)[..., None]
            energies.append(self.heads[layer](s).squeeze(-1))
        nodes = torch.stack(energies, -1).sum(-1)
        energy = nodes.new_zeros(graph["energy"].shape[0]).index_add(0, graph["batch"], nodes)
        return {"energy": energy, "forces": compute_forces(energy, graph["pos"], training)}


def compute_forces(energy: torch.Tensor, positions: torch.Tensor, training: bool) -> torch.Tensor:
    """As MACE's helper does it."""
    gradient = torch.autograd.grad(
        outputs=[energy],
        inputs=[positions],
        grad_outputs=[torch.ones_like(energy)],
        retain_graph=training,
        create_graph=training,
        allow_unused=True,
    )[0]
    return torch.zeros_like(positions) if gradient is None else -1 * gradient


@program
def mace(training: Training) -> dict[str, Any]:
    """Double precision, forces by a helper that allows unused inputs, groups of weights, an average."""
    model = Mace().double()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "products" in n], "weight_decay": 5e-4},
        {"params": [p for n, p in model.named_parameters() if "products" not in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adam(groups, 0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    mean = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )

    def train_step(model: nn.Module, graph: Graph) -> torch.Tensor:
        output = model(graph, training=True)
        energy = (output["energy"] - graph["energy"]).square().mean()
        return energy + 10 * (output["forces"] - graph["force"]).square().mean()

    train_step = training.step(train_step)
    data = {n: v.double() if v.is_floating_point() else v for n, v in molecules().items()}
    losses = []
    for _ in range(4):
        batch = {name: value.clone() for name, value in data.items()}
        optimizer.zero_grad(set_to_none=True)

        def step(batch: Graph = batch) -> torch.Tensor:
            loss = train_step(model, batch)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        mean.update_parameters(model)
    return {"losses": losses, "model": model, "mean": mean, "optimizer": optimizer}
