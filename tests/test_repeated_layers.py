"""Steps that are recorded without most of their alike layers: as if all had run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.capture import capture as capturing
from planner.capture.capture import capture
from planner.capture.captured_step import CapturedStep
from planner.capture.repeated.left_out import AT_EACH_END, LayersLeftOut
from planner.training_step.recorder import Recording
from planner.training_step.regions import find_regions
from planner.training_step.step import Step

_MANY = 12


class Layer(nn.Module):
    """Counts its calls, in a list that copies share; and reads its own number where it is told to."""

    def __init__(self, number: int, calls: list[int], reads_number: bool = False) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.number, self.calls, self.reads_number = number, calls, reads_number

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.norm(torch.relu(self.inner(x)) * 2.0)
        if self.reads_number and self.number % 5 == 4:
            inner = inner.tanh()
        return x + self.outer(inner) * (1.0 if scale is None else scale)


class Chain(nn.Module):
    """Layers in a row, with more around them."""

    def __init__(self, layers: int = _MANY, *, held: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(Layer(i, self.calls, **options) for i in range(layers))
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.mean() + 1).exp()
        x, held = self.first(x), []
        for number, layer in enumerate(self.layers):
            x = layer(x, scale=scale)
            if number in self.held:
                held.append(x)
        loss: torch.Tensor = self.last(x).square().mean() + sum(h.mean() for h in held)
        return loss


@torch.compiler.disable
def as_written(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    return x.tanh() if layer.number == 5 else x.sin()


class BrokenLayer(Layer):
    """Behind its graph something runs as written."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return as_written(super().forward(x, scale), self)


class BrokenBefore(Layer):
    """In front of its graph something runs as written."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(as_written(x, self), scale)


class Broken(Chain):
    """Of such layers, of which one in the middle runs something else there."""

    def __init__(self, layer: type[Layer] = BrokenLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(i, self.calls) for i in range(_MANY))


class Between(Chain):
    """With an operation between each layer and the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * 0.5
        loss: torch.Tensor = self.last(x).square().mean()
        return loss


class Two(nn.Module):
    """Two chains, of which the second uses what the first returns in each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Chain(12), Chain(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.encoder.first(x), self.decoder.first(x)
        for layer in self.encoder.layers:
            y = layer(y)
        for layer in self.decoder.layers:
            z = layer(z, y)
        loss: torch.Tensor = z.square().mean()
        return loss


def shared(model: nn.Module, layers: tuple[int, ...]) -> nn.Module:
    """Layers of a chain with the weight of its first."""
    for number in layers:
        model.layers[number].inner.weight = model.layers[0].inner.weight  # type: ignore[index, union-attr]
    return model


def recorded(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, *, whole: bool, **options: Any
) -> tuple[CapturedStep, list[int]]:
    """The captured step, and how many events its recordings had before they were made longer."""
    lengths: list[int] = []
    longer = LayersLeftOut.lengthened

    def noted(self: LayersLeftOut, recording: Recording) -> tuple[Recording, int]:
        found = longer(self, recording)
        lengths.append(len(recording.events))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LayersLeftOut, "lengthened", noted)
        if whole:
            patch.setattr(capturing._Capture, "_layers", lambda *_: None)
        step = Step((torch.randn(3, 4),))
        return capture(model, step, regions=find_regions(model, "auto"), **options), lengths


def as_data(recording: Recording) -> tuple[Any, ...]:
    """All of a recording, but the numbers of autograd nodes."""
    events = [
        (e.call, e.reads, e.allocates, e.backward, e.graph, e.node and e.node[0]) for e in recording.events
    ]
    calls = [(str(call.func), str(call.args), str(call.kwargs)) for call in recording.calls]
    return events, recording.storages, calls, recording.gradients, recording.results


@pytest.mark.heavy
@pytest.mark.parametrize("accumulate", [None, True])
@pytest.mark.parametrize(
    "make",
    [
        Chain,
        Two,
        lambda: Chain(10),
        lambda: Chain(held=(0, 11)),
        lambda: nn.Sequential(
            nn.Linear(4, 8), *(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout()) for _ in range(10))
        ),
    ],
    ids=["chain", "two", "few", "held at the ends", "sequential"],
)
def test_a_recording_without_most_layers_is_made_as_long_as_with_all(
    make: Callable[[], nn.Module], accumulate: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    found, lengths = recorded(model, monkeypatch, whole=False, accumulate=accumulate)
    expected, whole = recorded(model, monkeypatch, whole=True, accumulate=accumulate)
    assert as_data(found.eager) == as_data(expected.eager)
    assert as_data(found.compiled) == as_data(expected.compiled)
    assert not whole
    assert len(lengths) == 2
    assert lengths[0] < len(found.eager.events)
    assert lengths[1] < len(found.compiled.events)
    assert found.eager_operations == expected.eager_operations


@pytest.mark.heavy
def test_as_many_layers_run_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [recorded(Chain(n), monkeypatch, whole=False)[1] for n in (2 * AT_EACH_END + 2, 20)]
    assert found[0] == found[1]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(held=(5,)),
        lambda: Chain(held=(8,)),
        lambda: Chain(held=tuple(range(_MANY))),
        Between,
        Broken,
        lambda: Broken(BrokenBefore),
        lambda: Chain(reads_number=True),
        lambda: shared(Chain(), (6,)),
        lambda: shared(Chain(), tuple(range(1, _MANY))),
    ],
    ids=[
        "one held",
        "last left out held",
        "all held",
        "between",
        "broken",
        "broken before",
        "another layer",
        "shared",
        "one weight",
    ],
)
def test_what_is_not_alike_is_recorded_with_all_layers(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    found, _ = recorded(model, monkeypatch, whole=False)
    expected, _ = recorded(model, monkeypatch, whole=True)
    assert as_data(found.eager) == as_data(expected.eager)
