"""A number that changes with every step, and decides what is on in a part of the forward."""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import planner
from tests.side_by_side import assert_same, counting_runs, left_by

Part = Callable[[nn.Module, Tensor, int, int], Tensor]


class Switched(nn.Module):
    """Layers of which the first are treated otherwise than the last."""

    first = 1

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.last, self.part = nn.Linear(32, 32), part

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.part(layer, x, i, self.first)
        return self.last(x.tanh()).square().mean()


def _within(context: Callable[[int, int], AbstractContextManager[Any]]) -> Part:
    def part(layer: nn.Module, x: Tensor, i: int, first: int) -> Tensor:
        with context(i, first):
            y: Tensor = x + layer(x).tanh()
        return y

    return part


def _checkpointed(layer: nn.Module, x: Tensor, i: int, first: int) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=i >= first)
    return y


def _set_and_set_back(layer: nn.Module, x: Tensor, i: int, first: int) -> Tensor:
    torch.set_grad_enabled(i >= first)
    y: Tensor = x + layer(x).tanh()
    torch.set_grad_enabled(True)
    return y


SWITCHED: dict[str, Part] = {
    "gradients": _within(lambda i, first: torch.set_grad_enabled(i >= first)),
    "gradients-set-back": _set_and_set_back,
    "no-gradients": _within(lambda i, first: torch.no_grad() if i < first else nullcontext()),
    "autocast": _within(lambda i, first: torch.autocast("cpu", enabled=i >= first)),
    "autocast-by-position": _within(lambda i, first: torch.amp.autocast("cpu", torch.bfloat16, i >= first)),
    "inference-mode": _within(lambda i, first: torch.inference_mode(i + 9 < first)),
    "checkpoint": _checkpointed,
}


def _steps(x: Tensor, firsts: list[int]) -> Callable[[Any], list[Tensor]]:
    def loop(model: Any) -> list[Tensor]:
        left = []
        for step, first in enumerate(firsts):
            model.zero_grad()
            model.first = first
            model(x[: len(x) - step % 2]).backward()
            left += [p.grad for p in model.parameters() if p.grad is not None]
        return left

    return loop


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.filterwarnings("error:.*without the plan:planner.PlanWarning")
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, id=name, marks=[] if name in ("gradients", "autocast") else [pytest.mark.heavy])
        for name, part in SWITCHED.items()
    ],
)
def test_a_number_that_changes_switches(part: Part, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, loop = Switched(part), _steps(torch.randn(64, 32), [1, 2, 0, 1])
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="150%", costs="roofline")
    with counting_runs() as runs:
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))
    assert runs.backward >= 4 or part is SWITCHED["inference-mode"]  # which is replayed
    assert not [record for record in caplog.records if record.exc_info and record.levelno > logging.DEBUG]
