"""Speech: transducers with their own lattice loss, and separation where the best order of speakers counts."""

import itertools
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.users.training import Training, program


class Transducer(nn.Module):
    """An encoder of frames, a predictor of words, and what joins them."""

    def __init__(self, words: int = 40, width: int = 96) -> None:
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv1d(40, width, 3, 2, 1), nn.ReLU(), nn.Conv1d(width, width, 3, 2, 1)
        )
        self.norm = nn.BatchNorm1d(width)
        self.encoder = nn.LSTM(width, width // 2, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.predictor = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.join = nn.Linear(width, width)
        self.out = nn.Linear(width, words)

    def forward(self, frames: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.subsample(frames.transpose(1, 2))).relu().transpose(1, 2)
        encoded, _ = self.encoder(x)
        predicted, _ = self.predictor(self.embedding(F.pad(words, (1, 0))))
        joint = self.join(encoded)[:, :, None] + self.dropout(predicted)[:, None]
        return self.out(torch.tanh(joint)).log_softmax(-1)


def transducer_loss(
    log_probs: torch.Tensor, words: torch.Tensor, times: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """The sum over all alignments, diagonal by diagonal of the lattice, by log-sum-exp."""
    batch, most, rows, _ = log_probs.shape
    blank = log_probs[..., 0]
    label = log_probs[:, :, :-1].gather(-1, words[:, None, :, None].expand(-1, most, -1, 1)).squeeze(-1)
    alpha = [log_probs.new_zeros(batch)[:, None]]
    for row in range(1, rows):
        alpha[0] = torch.cat([alpha[0], alpha[0][:, -1:] + label[:, 0, row - 1 : row]], 1)
    for time in range(1, most):
        stayed = alpha[-1] + blank[:, time - 1]
        columns = [stayed[:, 0]]
        for row in range(1, rows):
            columns.append(torch.logaddexp(stayed[:, row], columns[-1] + label[:, time, row - 1]))
        alpha.append(torch.stack(columns, 1))
    lattice = torch.stack(alpha, 1)
    which = torch.arange(batch)
    total = lattice[which, times - 1, lengths] + blank[which, times - 1, lengths]
    return -total.mean()


@program
def transducer(training: Training) -> dict[str, Any]:
    """bf16 for the model, the lattice in single precision; lengths that vary; accumulation, clipping."""
    model = Transducer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) ** -0.5, step / 4 + 0.1)
    )

    def train_step(
        model: nn.Module,
        frames: torch.Tensor,
        words: torch.Tensor,
        times: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = model(frames, words)
        return transducer_loss(log_probs.float(), words, times, lengths)

    train_step = training.step(train_step)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            frames, words = torch.randn(4, 48, 40), torch.randint(1, 40, (4, 6))
            times, lengths = torch.randint(6, 13, (4,)), torch.randint(2, 7, (4,))

            def step(batch: tuple[torch.Tensor, ...] = (frames, words, times, lengths)) -> torch.Tensor:
                loss = train_step(model, *batch) / 2
                loss.backward()
                return loss.detach()

            losses.append(training.run(train_step, step))
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class GlobalNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1, width, 1)), nn.Parameter(torch.zeros(1, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((1, 2), keepdim=True)
        spread = ((x - mean) ** 2).mean((1, 2), keepdim=True)
        return self.weight * (x - mean) / (spread + 1e-8).sqrt() + self.bias


class ConvTasNet(nn.Module):
    """A learnt filter bank, masks by dilated convolutions, and its inverse."""

    def __init__(self, filters: int = 64, hidden: int = 96, blocks: int = 4, speakers: int = 2) -> None:
        super().__init__()
        self.speakers, self.filters = speakers, filters
        self.encoder = nn.Conv1d(1, filters, 16, 8, bias=False)
        self.decoder = nn.ConvTranspose1d(filters, 1, 16, 8, bias=False)
        self.bottleneck = nn.Sequential(GlobalNorm(filters), nn.Conv1d(filters, 48, 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(48, hidden, 1), nn.PReLU(), GlobalNorm(hidden),
                nn.Conv1d(hidden, hidden, 3, padding=2**i, dilation=2**i, groups=hidden),
                nn.PReLU(), GlobalNorm(hidden), nn.Conv1d(hidden, 96, 1),
            )
            for i in range(blocks)
        )  # fmt: skip
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(48, filters * speakers, 1), nn.Sigmoid())

    def forward(self, mixture: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(mixture[:, None]).relu()
        x, skipped = self.bottleneck(encoded), 0.0
        for block in self.blocks:
            residual, skip = block(x).chunk(2, 1)
            x, skipped = x + residual, skipped + skip
        masks = self.mask(skipped).view(x.shape[0], self.speakers, self.filters, -1)
        sources = self.decoder((masks * encoded[:, None]).flatten(0, 1))
        return sources.view(x.shape[0], self.speakers, -1)


def best_order(estimate: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The negative ratio of signal to noise, in the best order of the speakers."""
    estimate, truth = estimate - estimate.mean(-1, keepdim=True), truth - truth.mean(-1, keepdim=True)
    e, t = estimate[:, None], truth[:, :, None]
    projection = (e * t).sum(-1, keepdim=True) * t / (t**2).sum(-1, keepdim=True)
    ratio = 10 * torch.log10((projection**2).sum(-1) / (((e - projection) ** 2).sum(-1) + 1e-8) + 1e-8)
    count = truth.shape[1]
    orders = list(itertools.permutations(range(count)))
    each = torch.stack([sum(ratio[:, s, order[s]] for s in range(count)) for order in orders], 1) / count
    best, _ = each.max(1)
    return -best.mean()


@program
def conv_tasnet(training: Training) -> dict[str, Any]:
    """A loss over permutations, in the loop; clipping; weights averaged at the end."""
    model = training.model(ConvTasNet(), loss=lambda out: best_order(out, torch.ones_like(out).cumsum(-1)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    losses = []
    for _ in range(4):
        sources = torch.randn(4, 2, 2400)
        optimizer.zero_grad()

        def step(sources: torch.Tensor = sources) -> torch.Tensor:
            loss = best_order(model(sources.sum(1)), sources)
            loss.backward()
            return loss.detach()

        losses.append(training.run(model, step))
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}
