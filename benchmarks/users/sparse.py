"""What data choose: experts, edges of graphs, grids of splines."""

import copy
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, mlp, program


class Experts(nn.Module):
    """The two best of some experts for each word, found by nonzero; a balance is left in an attribute."""

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(count))
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        logits = self.gate(flat)
        if self.training:
            logits = logits + torch.randn_like(logits) * 0.1
        chances = logits.softmax(-1, dtype=torch.float)
        weight, chosen = chances.topk(2, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(flat.dtype)
        share = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (share * chances.mean(0)).sum()
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                y.index_add_(0, rows, (expert(flat[rows]) * weight[rows, place, None]).to(y.dtype))
        return y.view_as(x)


class SparseLanguage(nn.Module):
    def __init__(self, words: int = 200, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.experts = nn.ModuleList(Experts(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        mask = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        for i, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            y = self.norms[2 * i](x)
            x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
            x = x + experts(self.norms[2 * i + 1](x))
        return self.head(x)


@program
def mixture_of_experts(training: Training) -> dict[str, Any]:
    """Routing by nonzero with noise, losses that layers leave in attributes, bf16, clipping."""
    model = SparseLanguage()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train_step(model: SparseLanguage, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
        return loss + 0.01 * sum(layer.balance for layer in model.experts)

    train_step = training.step(train_step)
    losses = []
    for _ in range(4):
        words = torch.randint(0, 200, (4, 33))
        optimizer.zero_grad()

        def step(words: torch.Tensor = words) -> torch.Tensor:
            loss = train_step(model, words)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class SplineLayer(nn.Module):
    """Splines on the edges (KAN), on a grid that is fitted to the data now and then."""

    def __init__(self, wide_in: int, wide_out: int, grid: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order, self.grid_size = order, grid
        points = torch.arange(-order, grid + order + 1) * (2 / grid) - 1
        self.register_buffer("grid", points.expand(wide_in, -1).contiguous())
        self.base = nn.Parameter(torch.randn(wide_out, wide_in) / wide_in**0.5)
        self.spline = nn.Parameter(torch.randn(wide_out, wide_in, grid + order) * 0.1)
        self.scale = nn.Parameter(torch.ones(wide_out, wide_in))

    def bases(self, x: torch.Tensor) -> torch.Tensor:
        x, grid = x[..., None], self.grid
        found = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * found[..., :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * found[..., 1:]
            found = left + right
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.spline * self.scale[..., None]
        return F.linear(F.silu(x), self.base) + F.linear(self.bases(x).flatten(1), weight.flatten(1))

    @torch.no_grad()
    def update_grid(self, x: torch.Tensor) -> None:
        """Quantiles of the data become the grid; splines keep their values by least squares."""
        bases = self.bases(x).permute(1, 0, 2)
        values = torch.bmm(bases, (self.spline * self.scale[..., None]).permute(1, 2, 0))
        ordered = x.sort(0)[0]
        at = torch.linspace(0, x.shape[0] - 1, self.grid_size + 1).long()
        inner = ordered[at]
        step = (inner[-1] - inner[0] + 0.02) / self.grid_size
        even = torch.arange(self.grid_size + 1)[:, None] * step + inner[0] - 0.01
        inner = 0.02 * even + 0.98 * inner
        reach = torch.arange(self.order, 0, -1)[:, None]
        grid = torch.cat([inner[:1] - step * reach, inner, inner[-1:] + step * reach.flip(0)])
        self.grid.copy_(grid.T)
        new = self.bases(x).permute(1, 0, 2)
        ridge = 1e-4 * torch.eye(new.shape[-1])
        fitted = torch.linalg.solve(new.mT @ new + ridge, new.mT @ values)
        self.spline.data.copy_(fitted.permute(2, 0, 1) / self.scale[..., None])


@program
def spline_network(training: Training) -> dict[str, Any]:
    """Grids that are fitted between the steps, a penalty of the splines, LBFGS with a line search."""
    model = nn.Sequential(SplineLayer(4, 16), SplineLayer(16, 16), SplineLayer(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def fit_loss(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = x.new_zeros(())
        for layer in model:
            size = layer.spline.abs().mean(-1)
            share = size / size.sum()
            penalty = penalty + size.sum() - (share * share.log()).sum()
        return F.mse_loss(model(x), y).sqrt() + 1e-3 * penalty

    train_step = training.step(fit_loss)
    losses = []
    for number in range(3):
        x = torch.rand(300, 4) * 2 - 1
        y = (x.prod(-1, keepdim=True) + x[:, :1].sin()).exp()
        if number == 1:
            hidden = x
            for layer in model:
                layer.update_grid(hidden)
                hidden = layer(hidden).detach()

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()

            def step() -> torch.Tensor:
                loss = train_step(model, x, y)
                loss.backward()
                return loss.detach()

            losses.append(training.run(train_step, step))
            return losses[-1]

        optimizer.step(closure)
    return {"losses": losses, "model": model, "optimizer": optimizer}


class GraphAttention(nn.Module):
    """Attention over edges; sums by scatter_reduce, the largest by amax."""

    def __init__(self, wide_in: int, wide_out: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.value = nn.Linear(wide_in, wide_out, bias=False)
        self.left = nn.Parameter(torch.randn(heads, wide_out // heads) * 0.1)
        self.right = nn.Parameter(torch.randn(heads, wide_out // heads) * 0.1)
        self.skip = nn.Linear(wide_in, wide_out)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, count: int) -> torch.Tensor:
        source, target = edges
        h = self.value(x).unflatten(-1, (self.heads, -1))
        score = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(score)
        most = torch.full((count, self.heads), -1e30).scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - most[target]).exp()
        total = torch.zeros(count, self.heads).scatter_reduce(0, index, weight, "sum")
        weight = F.dropout(weight / (total[target] + 1e-16), 0.2, self.training)
        messages = (h[source] * weight[..., None]).flatten(1)
        return torch.zeros(count, messages.shape[1]).index_add(0, target, messages) + self.skip(x[:count])


class Sampled(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 16, sparse=False)
        self.layers = nn.ModuleList([GraphAttention(48, width), GraphAttention(width, width)])
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 7)

    def forward(
        self, x: torch.Tensor, nodes: torch.Tensor, hops: list[tuple[torch.Tensor, int]]
    ) -> torch.Tensor:
        x = torch.cat([x, self.embedding(nodes)], -1)
        x = F.elu(self.norm(self.layers[0](x, *hops[0])))
        return self.head(F.dropout(F.elu(self.layers[1](x, *hops[1])), 0.5, self.training))


def sampled(graph: torch.Tensor, seeds: torch.Tensor, most: int = 5) -> tuple[torch.Tensor, list[Any]]:
    """Some neighbours of the seeds, and of these; as many as there are, at most some of each."""
    hops: list[tuple[torch.Tensor, int]] = []
    nodes = seeds
    for _ in range(2):
        kept = []
        for place, node in enumerate(nodes.tolist()):
            found = graph[0][graph[1] == node]
            found = found[torch.randperm(len(found))[:most]]
            kept.append(torch.stack([found, torch.full_like(found, place)]))
        edges = torch.cat(kept, 1)
        others = edges[0].unique()
        new = others[~torch.isin(others, nodes)]
        count, nodes = len(nodes), torch.cat([nodes, new])
        place_of = torch.full((500,), -1).scatter(0, nodes, torch.arange(len(nodes)))
        hops.insert(0, (torch.stack([place_of[edges[0]], edges[1]]), count))
    return nodes, hops


@program
def sampled_graph(training: Training) -> dict[str, Any]:
    """Neighbours are drawn: other numbers of nodes and edges in each step; the best weights are kept."""
    model = Sampled()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
    graph, features, labels = (
        torch.randint(0, 500, (2, 3000)),
        torch.randn(500, 32),
        torch.randint(0, 7, (500,)),
    )

    def train_step(
        model: nn.Module, x: torch.Tensor, nodes: torch.Tensor, hops: list[Any], labels: torch.Tensor
    ) -> torch.Tensor:
        return F.cross_entropy(model(x, nodes, hops), labels)

    train_step = training.step(train_step)
    losses, best = [], (float("inf"), None)
    for _ in range(4):
        seeds = torch.randperm(500)[:32]
        nodes, hops = sampled(graph, seeds)
        optimizer.zero_grad()

        def step(
            nodes: torch.Tensor = nodes, hops: list[Any] = hops, seeds: torch.Tensor = seeds
        ) -> torch.Tensor:
            loss = train_step(model, features[nodes], nodes, hops, labels[seeds])
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step, sizes_vary=True))
        optimizer.step()
        if losses[-1].item() < best[0]:
            best = losses[-1].item(), copy.deepcopy(model.state_dict())
    return {"losses": losses, "model": model, "best": best[1], "optimizer": optimizer}
