"""Small models for fast tests: the same features as the zoo's, at a size of milliseconds."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import GPT, Built, ResNet


def small_gpt(batch: int = 4, layers: int = 2) -> Built:
    torch.manual_seed(0)
    model = GPT(words=50, width=32, heads=2, layers=layers, context=32)
    words = torch.randint(0, 50, (2, batch, 32))
    return model.train(), (words[0], words[1]), {}


def small_resnet(batch: int = 4) -> Built:
    torch.manual_seed(0)
    model = ResNet(width=8, stages=(2, 2))
    return model.train(), (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,))), {}


class Broken(nn.Module):
    """Two graphs with Python in between that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        )
        self.second = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def graph_break_model() -> Built:
    torch.manual_seed(0)
    return Broken().train(), (torch.randn(64, 32),), {}


class BrokenLayer(nn.Module):
    """A layer that is two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.widen(x))
        torch._dynamo.graph_break()
        return x + F.dropout(self.narrow(y).tanh(), 0.1, self.training)


class BrokenLayers(nn.Module):
    """Many layers of the same code, each with a graph break inside."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BrokenLayer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def layers_with_graph_breaks() -> Built:
    torch.manual_seed(0)
    return BrokenLayers().train(), (torch.randn(64, 32),), {}


class Classifier(nn.Module):
    """Returns logits and a feature; a loss of the logits alone leaves the feature's head without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU())
        self.head, self.extra = nn.Linear(64, 5), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x)
        return {"logits": self.head(x), "extra": torch.tanh(self.extra(x))}


def classifier() -> Built:
    torch.manual_seed(0)
    return Classifier().train(), (torch.randn(32, 16),), {}


def logits_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss of the logits alone."""
    return F.cross_entropy(output["logits"], torch.zeros(len(output["logits"]), dtype=torch.long))


def both_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss of both outputs."""
    return logits_loss(output) + output["extra"].square().mean()
