"""What resists capture: data that decides, Python that draws, hooks, sparse gradients, checkpoints inside."""

import random
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo import Built, images, in_zoo


class RoutedExperts(nn.Module):
    """Each expert sees the tokens that chose it: how many depends on the data."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, width)) for _ in range(4)
        )
        self.before = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
        self.after = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before(x)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                y[rows] = expert(x[rows]) * weight[rows, None]
        return self.after(x + y).square().mean()


@in_zoo
def nn_routed_experts() -> Built:
    return RoutedExperts(), (torch.randn(256, 64),), {}


class LayerDrop(nn.Module):
    """Python's random numbers decide which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.8:
                x = x + layer(x)
        return x.square().mean()


@in_zoo
def nn_layer_drop() -> Built:
    return LayerDrop(), (torch.randn(128, 64),), {}


class TorchLayerDrop(nn.Module):
    """PyTorch's random numbers decide which layers run, read with ``item``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()).item() < 0.9:
                x = x + layer(x)
        return x.square().mean()


@in_zoo
def nn_torch_layer_drop() -> Built:
    return TorchLayerDrop(), (torch.randn(128, 64),), {}


class EarlyStop(nn.Module):
    """Iterates until the state hardly changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.step, self.out = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(self.inward(x))
        for _ in range(6):
            following = 0.5 * torch.tanh(self.step(state)) + 0.5 * state
            if float((following - state).detach().abs().max()) < 1e-3:
                break
            state = following
        return self.out(state).square().mean()


@in_zoo
def nn_early_stop() -> Built:
    return EarlyStop(), (torch.randn(256, 32),), {}


class MaskedLoss(nn.Module):
    """Only the rows of interest count: a boolean index, whose size the data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen = label >= 0
        return F.cross_entropy(self.head(self.body(x)[seen]), label[seen])


@in_zoo
def nn_masked_loss() -> Built:
    return MaskedLoss(), (torch.randn(512, 64), torch.randint(-3, 10, (512,))), {}


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64, sparse=True)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(index).mean(1)).square().mean()


@in_zoo
def nn_sparse_gradient() -> Built:
    return SparseTable(), (torch.randint(0, 1000, (256, 4)),), {}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Square.apply(self.first(x)))


@in_zoo
def nn_custom_function() -> Built:
    return CustomFunction(), (torch.randn(256, 64),), {}


@in_zoo
def nn_hooks() -> Built:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model[4].weight.register_hook(lambda gradient: gradient * 3)
    return model, (torch.randn(256, 64),), {}


@in_zoo
def nn_backward_hooks() -> Built:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))
    for index in (1, 3):
        model[index].register_full_backward_hook(lambda module, inward, outward: (inward[0] * 2,))
    return model, (torch.randn(256, 64),), {}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(3)
        )
        self.inward = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


@in_zoo
def nn_checkpoint_inside() -> Built:
    return Checkpointed(False), (torch.randn(128, 64),), {}


@in_zoo
def nn_reentrant_checkpoint_inside() -> Built:
    return Checkpointed(True), (torch.randn(128, 64),), {}


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.body(x)


@in_zoo
def nn_input_mutation() -> Built:
    return ChangesInput(), (torch.randn(256, 64),), {}


class Counting(nn.Module):
    """Counts its steps in a buffer and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        self.steps += 1
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return (y - self.mean).square().mean()


@in_zoo
def nn_running_mean() -> Built:
    return Counting(), (torch.randn(256, 64),), {}


class Penalised(nn.Module):
    """A penalty on the gradient by its input: a backward inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Softplus(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.body(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y.square() / len(x) + (slope.norm(dim=-1) - 1).square().mean()


@in_zoo
def nn_gradient_penalty() -> Built:
    return Penalised(), (torch.randn(128, 32),), {}


class Ragged(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(states).square().mean()


@in_zoo
def nn_packed_sequence() -> Built:
    return Ragged(), (torch.randn(16, 20, 32), torch.randint(5, 21, (16,))), {}


class Unique(nn.Module):
    """Pools rows by the distinct labels in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
            nn.Linear(64, 4),
        )

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        kinds, where = torch.unique(label, return_inverse=True)
        pooled = torch.zeros(len(kinds), x.shape[1]).index_add(0, where, x)
        return self.head(pooled).square().mean()


@in_zoo
def nn_pooled_by_label() -> Built:
    return Unique(), (torch.randn(256, 64), torch.randint(0, 30, (256,))), {}


class Printing(nn.Module):
    """Logs as it goes: a graph break after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.stem, self.seen = nn.Conv2d(3, 8, 3, padding=1), [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
            self.seen[0] = float(x.detach().abs().mean())
        return x.square().mean()


@in_zoo
def nn_logging() -> Built:
    return Printing(), (images(4),), {}
