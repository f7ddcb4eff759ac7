"""Recurrent nets: kernels of torch.nn and cells in Python loops."""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import Built, in_zoo, words


class Recurrent(nn.Module):
    """A language model on a recurrent layer with tied embeddings."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.words, self.recurrent, self.head = nn.Embedding(256, 64), recurrent, nn.Linear(64, 256)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, last = self.recurrent(self.words(tokens))
        loss = F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())
        return {"loss": loss, "last": last}  # type: ignore[return-value]


def _language(recurrent: nn.Module) -> Built:
    return Recurrent(recurrent), (words(16), words(16)), {}


@in_zoo
def nn_lstm() -> Built:
    return _language(nn.LSTM(64, 64, 2, dropout=0.2, batch_first=True))


@in_zoo
def nn_gru() -> Built:
    return _language(nn.GRU(64, 64, 2, batch_first=True))


@in_zoo
def nn_rnn() -> Built:
    return _language(nn.RNN(64, 64, 2, nonlinearity="relu", batch_first=True))


@in_zoo
def nn_bidirectional_lstm() -> Built:
    return _language(nn.LSTM(64, 32, 2, bidirectional=True, batch_first=True))


class Unrolled(nn.Module):
    """A cell in a Python loop, with dropout on its state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.drop, self.head = cell, nn.Dropout(0.1), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[1], 64)
        cell = torch.zeros_like(state)
        for step in x:
            if isinstance(self.cell, nn.LSTMCell):
                state, cell = self.cell(step, (state, cell))
            else:
                state = self.cell(step, state)
            state = self.drop(state)
        return self.head(state).square().mean()


@in_zoo
def nn_lstm_cell() -> Built:
    return Unrolled(nn.LSTMCell(32, 64)), (torch.randn(24, 32, 32),), {}


@in_zoo
def nn_gru_cell() -> Built:
    return Unrolled(nn.GRUCell(32, 64)), (torch.randn(24, 32, 32),), {}


class Attentive(nn.Module):
    """Translation with additive attention, a step at a time, with teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 64)
        self.encoder, self.decoder = nn.GRU(64, 64, batch_first=True), nn.GRUCell(128, 64)
        self.query, self.key, self.score = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.head = nn.Linear(64, 256)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        states, last = self.encoder(self.words(source))
        keys, state, losses = self.key(states), last[0], []
        for t in range(target.shape[1] - 1):
            weights = self.score(torch.tanh(self.query(state)[:, None] + keys)).softmax(1)
            context = (weights * states).sum(1)
            state = self.decoder(torch.cat([self.words(target[:, t]), context], -1), state)
            losses.append(F.cross_entropy(self.head(state), target[:, t + 1]))
        return torch.stack(losses).mean()


@in_zoo
def nn_seq2seq_attention() -> Built:
    return Attentive(), (words(8, 16), words(8, 10)), {}


class ConvLSTM(nn.Module):
    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.wide, self.gates, self.out = (
            wide,
            nn.Conv2d(1 + wide, 4 * wide, 3, padding=1),
            nn.Conv2d(wide, 1, 1),
        )

    def forward(self, film: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(film.shape[1], self.wide, *film.shape[3:])
        cell, loss = torch.zeros_like(state), torch.zeros(())
        for frame, following in itertools.pairwise(film):
            i, f, o, g = self.gates(torch.cat([frame, state], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            loss = loss + F.mse_loss(self.out(state), following)
        return loss


@in_zoo
def nn_conv_lstm() -> Built:
    return ConvLSTM(), (torch.randn(6, 4, 1, 16, 16),), {}


class Speech(nn.Module):
    """Convolutions, a bidirectional GRU and the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(16, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.Hardtanh(0, 20, inplace=True)
        )
        self.recurrent, self.head = nn.GRU(32, 32, bidirectional=True, batch_first=True), nn.Linear(64, 20)

    def forward(self, sound: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.front(sound).transpose(1, 2))
        letters = self.head(states).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((len(sound),), letters.shape[0]), torch.full((len(sound),), text.shape[1])
        return F.ctc_loss(letters, text, *sizes)


@in_zoo
def nn_speech_ctc() -> Built:
    return Speech(), (torch.randn(8, 16, 64), torch.randint(1, 20, (8, 6))), {}
