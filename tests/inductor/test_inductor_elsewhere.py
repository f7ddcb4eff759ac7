"""Programs that Inductor emits for a GPU on a machine without one."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import device_interface

import planner
from planner.errors import CaptureError, PlannerError
from planner.lowering.inductor import InductorLowering
from planner.planning.inductor import emitted_model
from planner.problem.emitted_step import EmittedStep
from solvers.model.arrays import Schedule
from solvers.model.schedule import simulate

MIB = 1 << 20
Emitted = tuple[list[str], EmittedStep, planner.PreparedStep]


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Emitted]:
    """What says what Inductor emits for a step that recomputes nothing, and what that takes."""
    lower, sources = InductorLowering.emitted, list[str]()

    def noted(self: InductorLowering, *args: Any) -> Any:
        found = lower(self, *args)
        sources.append(found[0].source)
        return found

    monkeypatch.setattr(InductorLowering, "emitted", noted)

    def of(model: nn.Module, *args: torch.Tensor, device: str = "H100", again: bool = False) -> Emitted:
        options: Any = {"backend": "inductor", "unproven": True, "costs": "roofline"}
        sources.clear()
        prepared = planner.prepare(model.train(), args, loss=torch.sum, device=device, **options)
        inside = prepared._prepared
        schedule: Schedule = inside.problem.graph.base_schedule
        if again:
            schedule = prepared.plan("min").schedule
        sequences = inside.problem.backward_sequences(inside.captured, schedule)
        return list(sources), emitted_model(inside).step(sequences), prepared

    return of
