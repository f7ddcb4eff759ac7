"""Contrastive learning: batches that are larger than memory, queues, teachers that follow."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, average, mlp, program


class TextEncoder(nn.Module):
    def __init__(self, words: int = 300, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(words, width),
            nn.Parameter(torch.randn(1, 24, width) * 0.02),
        )
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.1, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(words) + self.positions, src_key_padding_mask=words == 0)
        return F.normalize(self.head(x.mean(1)), dim=-1)


@program
def grad_cache(training: Training) -> dict[str, Any]:
    """Embeddings of parts without gradients, the loss of all, then each part again with its random state."""
    model = training.model(TextEncoder(), loss=lambda embedded: embedded.cumsum(-1).square().mean())
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], 1e-3)
    losses = []
    for _ in range(3):
        queries, documents = (torch.randint(0, 300, (24, 24)) for _ in range(2))
        parts = [*queries.split(8), *documents.split(8)]
        states, embedded = [], []
        with torch.no_grad():
            for part in parts:
                states.append(torch.get_rng_state())
                embedded.append(model(part))
        cached = torch.cat(embedded).requires_grad_()
        logits = cached[:24] @ cached[24:].T * scale.exp()
        loss = F.cross_entropy(logits, torch.arange(24))
        optimizer.zero_grad()
        loss.backward()
        gradients = cached.grad.split(8)
        after = torch.get_rng_state()
        for part, state, gradient in zip(parts, states, gradients, strict=True):
            torch.set_rng_state(state)

            def step(part: torch.Tensor = part, gradient: torch.Tensor = gradient) -> None:
                (model(part) * gradient).sum().backward()

            training.run(model, step)
        torch.set_rng_state(after)
        losses.append(loss.detach())
        optimizer.step()
    return {"losses": losses, "model": model, "scale": scale, "optimizer": optimizer}


class Views(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.projector = mlp(2 * width, 64, 32, activation=nn.ReLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.projector(self.net(x)), dim=1)


class MoCo(nn.Module):
    """A queue of keys in a buffer, and an encoder that follows inside of the forward."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.query = Views()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.query(first)
        with torch.no_grad():
            for kept, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                kept.data = kept.data * 0.99 + new.data * 0.01
            order = torch.randperm(second.shape[0])
            k = self.key(second[order])[order.argsort()]
        positive = torch.einsum("nc,nc->n", q, k)[:, None]
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], 1) / 0.07
        at = int(self.pointer)
        self.queue[:, at : at + k.shape[0]] = k.T
        self.pointer[0] = (at + k.shape[0]) % self.queue.shape[1]
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


@program
def moco(training: Training) -> dict[str, Any]:
    """A queue that is written in the forward, keys by an encoder that follows by .data, shuffled batches."""
    model = MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def train_step(model: nn.Module, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        logits, labels = model(first, second)
        return F.cross_entropy(logits, labels)

    train_step = training.step(train_step)
    losses = []
    for _ in range(4):
        image = torch.randn(16, 3, 16, 16)
        views = [image + 0.1 * torch.randn_like(image) for _ in range(2)]
        optimizer.zero_grad()

        def step(views: list[torch.Tensor] = views) -> torch.Tensor:
            loss = train_step(model, *views)
            loss.backward()
            return loss.detach()

        losses.append(training.run(train_step, step))
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


def crops(count: int, batch: int = 8) -> Iterator[torch.Tensor]:
    """Two large crops and some small ones of each image."""
    for number in range(count):
        side = 16 if number < 2 else 8
        yield torch.randn(batch, 3, side, side)


@program
def self_distillation(training: Training) -> dict[str, Any]:
    """A teacher that follows, a centre that follows, crops of two sizes, the last layer frozen at first."""
    student = nn.Sequential(Views(), nn.utils.parametrizations.weight_norm(nn.Linear(32, 64, bias=False)))
    teacher = copy.deepcopy(student).requires_grad_(False)
    centre = torch.zeros(1, 64)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    decays = [0.04, 0.05, 0.06, 0.07]

    def train_step(
        student: nn.Module, teacher: nn.Module, views: list[torch.Tensor], centre: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        large = torch.cat(views[:2])
        with torch.no_grad():
            seen = teacher(large)
            wanted = ((seen - centre) / 0.04).softmax(-1).chunk(2)
        drawn = [
            *(student(large) / 0.1).chunk(2),
            *(student(torch.cat(views[2:])) / 0.1).chunk(len(views) - 2),
        ]
        terms = [
            -(w * v.log_softmax(-1)).sum(-1).mean()
            for i, w in enumerate(wanted)
            for j, v in enumerate(drawn)
            if i != j
        ]
        return {"loss": torch.stack(terms).mean(), "mean": seen.mean(0, keepdim=True)}

    train_step = training.step(train_step)
    losses = []
    for number in range(4):
        for group in optimizer.param_groups:
            group["weight_decay"] = decays[number]
        views = list(crops(4))

        def step(
            views: list[torch.Tensor] = views, centre: torch.Tensor = centre
        ) -> tuple[torch.Tensor, ...]:
            output = train_step(student, teacher, views, centre)
            output["loss"].backward()
            return output["loss"].detach(), output["mean"]

        optimizer.zero_grad()
        loss, seen = training.run(train_step, step)
        losses.append(loss)
        if number < 2:
            for parameter in student[1].parameters():
                parameter.grad = None
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        average(teacher, student, 0.99)
        centre = centre * 0.9 + seen * 0.1
    return {
        "losses": losses,
        "student": student,
        "teacher": teacher,
        "centre": centre,
        "optimizer": optimizer,
    }
