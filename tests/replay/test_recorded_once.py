"""One recording tells a step's memory without a plan and with one; a second pass is made where it must be."""

from typing import Any

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.replay.capture import ReplayedStep, capture_replayed
from planner.training_step.recorder import Recording
from planner.training_step.step import Step


class Counting(nn.Module):
    """Drops its dropout after the first step."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.first(x).relu()
        return self.last(x if self.steps > 1 else x.sin())


class Turned(nn.Module):
    """A linear layer of rows that are not contiguous: PyTorch adds its bias in place, not so under a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(0, 1)).sin()


class Mixed(nn.Module):
    """Batch normalisation, dropout, writes in place and a gradient that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).mean((2, 3))
        return self.head(self.head(x).tanh()).softmax(-1)


def recorded(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[ReplayedStep, int]:
    """The captured step, and how often it ran."""
    passes: list[None] = []
    record = capture._Capture._record

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        passes.append(None)
        return record(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(capture._Capture, "_record", counting)
        return capture_replayed(model, Step((x,), {}, torch.sum)), len(passes)


def memory(recording: Recording) -> list[tuple[int, int | None]]:
    """Bytes and end of every storage, as the number of operations that have run; those that make nothing
    differ, as autograd detaches what hooks hand out."""
    running, so_far = [], 0
    for event in recording.events:
        so_far += bool(event.allocates)
        running.append(so_far)
    return [(s.bytes, None if s.died_after is None else running[s.died_after]) for s in recording.storages]


@pytest.mark.parametrize(
    ("build", "shape", "passes"),
    [(Mixed, (2, 3, 6, 6), 1), (Counting, (4, 8), 2), (Turned, (2, 3, 8), 2)],
)
def test_what_autograd_saves_tells_the_step_without_a_plan(
    build: type[nn.Module], shape: tuple[int, ...], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build(), torch.randn(shape)
    captured, ran = recorded(model, x, monkeypatch)
    assert ran == passes
    if build is Counting:
        model(x)  # the step that is planned is one of those that follow
        assert captured.saved.operators.count(torch.ops.aten.sin.default) == 0
    alone = capture.record_eagerly(model, Step((x,), {}, torch.sum), lambda copied: None)
    assert memory(captured.eager) == memory(alone)
    assert memory(captured.compiled) != memory(alone)
