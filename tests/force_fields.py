"""Small force fields built like public ones: an energy by messages over edges, and its gradient.

Each takes a mapping, as such models do: positions, pairs of atoms, and the molecule of each atom. It returns
the mapping with energies and forces.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Data = dict[str, Tensor]

MOLECULES, ATOMS = 4, 6
WIDTH = 16


def batch(seed: int) -> Data:
    """Molecules with all pairs of their atoms as edges."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.combinations(torch.arange(ATOMS))
    pairs = torch.cat([pairs, pairs.flip(1)])
    edges = torch.cat([pairs + ATOMS * i for i in range(MOLECULES)]).T.contiguous()
    return {
        "positions": torch.randn(MOLECULES * ATOMS, 3, generator=generator),
        "kinds": torch.randint(3, (MOLECULES * ATOMS,), generator=generator),
        "edges": edges,
        "molecules": torch.arange(MOLECULES).repeat_interleave(ATOMS),
        "cells": torch.eye(3).expand(MOLECULES, 3, 3).contiguous(),
    }


def loss(found: Data) -> Tensor:
    """A loss of energies and forces."""
    return 1e-2 * found["energy"].square().mean() + found["forces"].square().mean()


def _mlp(*widths: int) -> nn.Sequential:
    first, hidden, last = widths
    return nn.Sequential(nn.Linear(first, hidden), nn.SiLU(), nn.Linear(hidden, last))


class Interactions(nn.Module):
    """Messages of neighbours, twice, by the lengths of edges; an energy of each atom."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, WIDTH)
        self.filters = nn.ModuleList(_mlp(8, WIDTH, WIDTH) for _ in "ab")
        self.updates = nn.ModuleList(_mlp(WIDTH, WIDTH, WIDTH) for _ in "ab")
        self.out = _mlp(WIDTH, WIDTH, 1)

    def forward(self, kinds: Tensor, edges: Tensor, lengths: Tensor) -> Tensor:
        x = self.kinds(kinds)
        waves = torch.exp(-((lengths - torch.linspace(0, 4, 8)) ** 2))
        for filters, update in zip(self.filters, self.updates, strict=True):
            messages = x[edges[1]] * filters(waves)
            x = x + update(torch.zeros_like(x).index_add(0, edges[0], messages))
        energies: Tensor = self.out(x)
        return energies


def _vectors(positions: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    vectors = positions[edges[1]] - positions[edges[0]]
    return vectors, torch.linalg.norm(vectors, dim=-1, keepdim=True)


# ---- MACE: a function prepares the graph, another differentiates ----------------------------------------


def prepare_graph(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    data["positions"].requires_grad_(True)
    vectors, lengths = _vectors(data["positions"], data["edges"])
    return data["positions"], vectors, lengths


def compute_forces(energy: Tensor, positions: Tensor, training: bool = True) -> Tensor:
    gradient = torch.autograd.grad(
        outputs=[energy],
        inputs=[positions],
        grad_outputs=[torch.ones_like(energy)],
        retain_graph=training,
        create_graph=training,
        allow_unused=True,
    )[0]
    if gradient is None:
        return torch.zeros_like(positions)
    return -1 * gradient


class LikeMace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.interactions = Interactions()

    def forward(self, data: Data) -> Data:
        positions, _, lengths = prepare_graph(data)
        energies = self.interactions(data["kinds"], data["edges"], lengths)
        energy = torch.zeros(MOLECULES, 1).index_add(0, data["molecules"], energies)
        return {"energy": energy, "forces": compute_forces(energy, positions, self.training)}


class LikeMaceWithStress(LikeMace):
    """Differentiates by a strain too, which is made in a function."""

    def forward(self, data: Data) -> Data:
        positions, strain, lengths = self.strained(data)
        energies = self.interactions(data["kinds"], data["edges"], lengths)
        energy = torch.zeros(MOLECULES, 1).index_add(0, data["molecules"], energies)
        forces, virials = torch.autograd.grad(
            [energy], [positions, strain], [torch.ones_like(energy)], create_graph=True, allow_unused=True
        )
        if forces is None or virials is None:
            forces, virials = torch.zeros_like(positions), torch.zeros_like(strain)
        return {"energy": energy + virials.square().sum((1, 2))[:, None], "forces": -forces}

    def strained(self, data: Data) -> tuple[Tensor, Tensor, Tensor]:
        data["positions"].requires_grad_(True)
        strain = torch.zeros(MOLECULES, 3, 3)
        strain.requires_grad_(True)
        symmetric = 0.5 * (strain + strain.transpose(1, 2))[data["molecules"]]
        moved = data["positions"] + torch.einsum("be,bec->bc", data["positions"], symmetric)
        return data["positions"], strain, _vectors(moved, data["edges"])[1]


# ---- NequIP: modules hand on a mapping; one wraps the energy and differentiates ------------------------


class _EdgesInto(nn.Module):
    def forward(self, data: Data) -> Data:
        data["vectors"], data["lengths"] = _vectors(data["positions"], data["edges"])
        return data


class _EnergyInto(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.interactions = Interactions()

    def forward(self, data: Data) -> Data:
        energies = self.interactions(data["kinds"], data["edges"], data["lengths"])
        data["energy"] = torch.zeros(MOLECULES, 1).index_add(0, data["molecules"], energies)
        return data


class LikeNequip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(_EdgesInto(), _EnergyInto())

    def forward(self, data: Data) -> Data:
        data = data.copy()
        wanted: list[Tensor] = []
        for name in ["positions"]:
            wanted.append(data[name])
            data[name].requires_grad_(True)
        data = self.energy(data)
        gradients = torch.autograd.grad([data["energy"].sum()], wanted, create_graph=self.training)
        return {"energy": data["energy"], "forces": torch.neg(gradients[0])}


# ---- SchNetPack: a method prepares inputs; the number of molecules depends on data ---------------------


class _Atomwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.interactions = Interactions()

    def forward(self, inputs: Data) -> Data:
        energies = self.interactions(inputs["kinds"], inputs["edges"], inputs["lengths"])
        count = int(inputs["molecules"][-1]) + 1
        inputs["energy"] = torch.zeros(count, 1).index_add(0, inputs["molecules"], energies)
        return inputs


class _Forces(nn.Module):
    def forward(self, inputs: Data) -> Data:
        energy = inputs["energy"]
        gradients = torch.autograd.grad(
            [energy], [inputs["positions"]], [torch.ones_like(energy)], create_graph=self.training
        )
        inputs["forces"] = -gradients[0]
        return inputs


class LikeSchnetpack(nn.Module):
    derivatives: Sequence[str] = ("positions",)

    def __init__(self) -> None:
        super().__init__()
        self.edges, self.outputs = _EdgesInto(), nn.ModuleList([_Atomwise(), _Forces()])

    def initialize_derivatives(self, inputs: Data) -> Data:
        for name in self.derivatives:
            inputs[name].requires_grad_()
        return inputs

    def forward(self, inputs: Data) -> Data:
        inputs = self.edges(self.initialize_derivatives(dict(inputs)))
        for output in self.outputs:
            inputs = output(inputs)
        return {name: inputs[name] for name in ("energy", "forces")}


# ---- PaiNN: scalars and vectors of atoms; the forward sets the attribute requires_grad -----------------


class LikePainn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, WIDTH)
        self.filters, self.update = _mlp(8, WIDTH, 3 * WIDTH), _mlp(2 * WIDTH, WIDTH, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, WIDTH, bias=False), _mlp(WIDTH, WIDTH, 1)

    def forward(self, data: Data) -> Data:
        positions, edges = data["positions"], data["edges"]
        positions.requires_grad = True
        vectors, lengths = _vectors(positions, edges)
        waves = torch.exp(-((lengths - torch.linspace(0, 4, 8)) ** 2))
        scalars, directions = self.kinds(data["kinds"]), torch.zeros(len(positions), 3, WIDTH)
        for _ in range(2):
            to_scalar, to_old, to_new = (self.filters(waves) * scalars[edges[1]].repeat(1, 3)).chunk(3, -1)
            pushed = to_old[:, None] * directions[edges[1]]
            pushed = pushed + to_new[:, None] * (vectors / lengths)[..., None]
            directions = directions.index_add(0, edges[0], pushed)
            scalars = scalars.index_add(0, edges[0], to_scalar)
            norms = (self.mix(directions).square().sum(1) + 1e-8).sqrt()
            scalars = scalars + self.update(torch.cat([scalars, norms], -1))
        energy = torch.zeros(MOLECULES, 1).index_add(0, data["molecules"], self.out(scalars))
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        return {"energy": energy, "forces": forces}


# ---- TorchMD-Net: differentiates and counts molecules in the forward -----------------------------------


class LikeTorchmdNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.representation = Interactions()

    def forward(self, data: Data) -> Data:
        positions = data["positions"]
        positions.requires_grad_(True)
        count = int(data["molecules"].max()) + 1
        _, lengths = _vectors(positions, data["edges"])
        x = self.representation(data["kinds"], data["edges"], lengths)
        y = torch.zeros(count, 1).index_add(0, data["molecules"], x)
        gradient = torch.autograd.grad(
            [y],
            [positions],
            grad_outputs=[torch.ones_like(y)],
            create_graph=self.training,
            retain_graph=self.training,
        )[0]
        assert gradient is not None, "Autograd returned None for the force prediction."
        return {"energy": y, "forces": -gradient}
