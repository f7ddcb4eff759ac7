"""Graphs, sets, points and tables."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import Built, in_zoo


def _edges(nodes: int = 256, edges: int = 1024) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges))


class GraphConvolution(nn.Module):
    """Sums over edges with ``index_add``, scaled by degrees."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(wide, wide), nn.Linear(wide, wide)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        gathered = torch.zeros_like(x).index_add(0, target, x[source])
        return F.relu(self.own(x) + self.near(gathered / degree[:, None]))


class GraphAttention(nn.Module):
    """Softmax over each node's edges by scattering maxima and sums."""

    def __init__(self, wide: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.project, self.score = (
            heads,
            nn.Linear(wide, wide),
            nn.Parameter(torch.randn(heads, 2 * wide // heads)),
        )

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        y = self.project(x).view(len(x), self.heads, -1)
        score = F.leaky_relu((torch.cat([y[source], y[target]], -1) * self.score).sum(-1), 0.2)
        index = target[:, None].expand_as(score)
        top = torch.full((len(x), self.heads), -torch.inf).scatter_reduce(0, index, score, "amax")
        weight = torch.exp(score - top[target])
        total = torch.zeros(len(x), self.heads).scatter_add(0, index, weight)
        message = y[source] * (weight / total[target])[..., None]
        return F.elu(torch.zeros_like(y).index_add(0, target, message).flatten(1))


class GraphNet(nn.Module):
    def __init__(self, layer: type[nn.Module], wide: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(wide) for _ in range(layers))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(wide, 7)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(layer(x, edges))
        return F.cross_entropy(self.head(x), label)


@in_zoo
def nn_graph_convolution() -> Built:
    return GraphNet(GraphConvolution), (torch.randn(256, 32), _edges(), torch.randint(0, 7, (256,))), {}


@in_zoo
def nn_graph_attention() -> Built:
    return GraphNet(GraphAttention), (torch.randn(256, 32), _edges(), torch.randint(0, 7, (256,))), {}


class Interactions(nn.Module):
    """Messages between atoms by distance, with energies summed per molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.filter = (
            nn.Embedding(10, 32),
            nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 32)),
        )
        self.mix, self.energy = nn.Linear(32, 32), nn.Linear(32, 1)
        self.register_buffer("centres", torch.linspace(0, 3, 16))

    def forward(
        self, kind: torch.Tensor, place: torch.Tensor, edges: torch.Tensor, molecule: torch.Tensor
    ) -> torch.Tensor:
        source, target = edges
        x = self.atoms(kind)
        distance = (place[source] - place[target]).square().sum(-1).add(1e-6).sqrt()
        spread = torch.exp(-10 * (distance[:, None] - self.centres).square())
        for _ in range(2):
            x = x + torch.tanh(
                self.mix(torch.zeros_like(x).index_add(0, target, x[source] * self.filter(spread)))
            )
        return torch.zeros(16, 1).index_add(0, molecule, self.energy(x)).square().mean()


@in_zoo
def nn_molecules() -> Built:
    return (
        Interactions(),
        (torch.randint(0, 10, (256,)), torch.randn(256, 3), _edges(), torch.arange(256) // 16),
        {},
    )


class Points(nn.Module):
    """A net of point clouds: shared layers, a maximum over points, a learned alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(
            nn.Conv1d(3, 32, 1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(32, 9),
        )
        self.body = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 1))
        self.head = nn.Linear(64, 10)

    def forward(self, points: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        turn = self.align(points).view(-1, 3, 3) + torch.eye(3)
        return F.cross_entropy(self.head(self.body(turn @ points).amax(-1)), label)


@in_zoo
def nn_point_cloud() -> Built:
    return Points(), (torch.randn(8, 3, 128), torch.randint(0, 10, (8,))), {}


class Edges(nn.Module):
    """Features of the nearest neighbours, found again in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 32), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, points: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = points
        for layer in (self.first, self.second):
            near = torch.cdist(x, x).topk(8, largest=False).indices
            around = torch.stack([cloud[index] for cloud, index in zip(x, near, strict=True)])
            here = x[:, :, None].expand_as(around)
            x = F.relu(layer(torch.cat([here, around - here], -1))).amax(2)
        return F.cross_entropy(self.head(x.amax(1)), label)


@in_zoo
def nn_neighbour_graph() -> Built:
    return Edges(), (torch.randn(4, 64, 3), torch.randint(0, 10, (4,))), {}


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(16, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU())
        self.all = nn.Sequential(nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(self.each(x).sum(1)).square().mean()


@in_zoo
def nn_deep_set() -> Built:
    return DeepSet(), (torch.randn(16, 64, 16),), {}


class Recommender(nn.Module):
    """Bags of embeddings and their products, as in DLRM."""

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(500, 32, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(
        self, dense: torch.Tensor, index: list[torch.Tensor], offset: list[torch.Tensor]
    ) -> torch.Tensor:
        x = self.bottom(dense)
        parts = [table(i, o) for table, i, o in zip(self.tables, index, offset, strict=True)]
        z = torch.stack([x, *parts], 1)
        products = torch.bmm(z, z.transpose(1, 2))
        i, j = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1))


@in_zoo
def nn_recommender() -> Built:
    batch = 256
    index, offset = (
        [f() for _ in range(4)]
        for f in (lambda: torch.randint(0, 500, (batch * 3,)), lambda: torch.arange(batch) * 3)
    )
    return Recommender(), (torch.randn(batch, 13), index, offset), {}


class Factorised(nn.Module):
    """A factorisation machine with a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.factors = nn.Embedding(1000, 1), nn.Embedding(1000, 16)
        self.deep = nn.Sequential(nn.Linear(8 * 16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1))

    def forward(self, fields: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        factors = self.factors(fields)
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(-1, keepdim=True)
        score = self.weights(fields).sum(1) + pairs + self.deep(factors.flatten(1))
        return F.binary_cross_entropy_with_logits(score.squeeze(1), clicked)


@in_zoo
def nn_factorisation_machine() -> Built:
    return Factorised(), (torch.randint(0, 1000, (256, 8)), torch.randint(0, 2, (256,)).float()), {}


class Table(nn.Module):
    """Columns as tokens of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.scale = nn.Embedding(80, 32), nn.Parameter(torch.randn(6, 32))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        self.head = nn.Linear(32, 1)

    def forward(self, kinds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.kinds(kinds), numbers[..., None] * self.scale], 1)
        return self.head(self.encoder(tokens).mean(1)).square().mean()


@in_zoo
def nn_table_transformer() -> Built:
    return Table(), (torch.randint(0, 80, (32, 8)), torch.randn(32, 6)), {}


class Policy(nn.Module):
    """An actor and a critic with the clipped loss of PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = (
            nn.Sequential(nn.Linear(24, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()),
            nn.Linear(128, 6),
            nn.Linear(128, 1),
        )

    def forward(
        self, seen: torch.Tensor, action: torch.Tensor, before: torch.Tensor, gain: torch.Tensor
    ) -> torch.Tensor:
        x = self.body(seen)
        chances = torch.distributions.Categorical(logits=self.actor(x))
        ratio = torch.exp(chances.log_prob(action) - before)
        clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return 0.5 * F.mse_loss(self.critic(x).squeeze(-1), gain) - clipped - 0.01 * chances.entropy().mean()


@in_zoo
def nn_policy() -> Built:
    return (
        Policy(),
        (torch.randn(512, 24), torch.randint(0, 6, (512,)), torch.randn(512), torch.randn(512)),
        {},
    )
