"""One run of a training program, with plans or without, and what is seen of its memory."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn as nn

import planner
from planner.capture.captured_step import NO_LOSS
from planner.planfile.plan import PlanRecord
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak

Result = TypeVar("Result")


@dataclass
class Training:
    """What a program plans with and measures by.

    Attributes:
        planned: Whether it trains by plans.
        options: Of ``planner.step`` and ``planner.auto_checkpoint``.
        last: By the name of a part: how many calls of it an earlier run had. The last one is measured: what
            is measured cannot be planned, as plans measure too.
        calls: By the name of a part: its calls so far.
        peaks: By the name of a part: what was measured.
        predictions: By the name of a part: the peaks that its plan predicts with the plan and without it;
            None where it does not count the loss.
        parts_with_plan: The parts that had a plan in their last call.
    """

    planned: bool
    options: dict[str, Any]
    last: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peaks: dict[str, int] = field(default_factory=dict)
    predictions: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    parts_with_plan: set[str] = field(default_factory=set)

    def step(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function, by a plan of its own where this run is planned."""
        return planner.step(function, **self.options | options) if self.planned else function

    def model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The module, by a plan where this run is planned."""
        return planner.auto_checkpoint(model, **self.options | options) if self.planned else model

    def run(self, of: Callable[..., Any], part: Callable[[], Result]) -> Result:
        """Run a part of the loop, from the forward to the end of the backward.

        Args:
            of: What is planned of it: its plan is the one whose prediction counts.
            part: What to run, with gradients as they are when a step begins.
        """
        name = getattr(of, "__name__", type(of).__name__)
        self.calls[name] += 1
        if self.calls[name] != self.last.get(name):
            return part()
        returned: list[Result] = []
        self.peaks[name] = measure_peak(lambda: returned.append(part()), "cpu").peak_bytes
        plan = _plan_of(of)
        if plan is not None:
            self.parts_with_plan.add(name)
            counted = NO_LOSS not in plan.notes
            both = (plan.predicted.dynamic_peak_bytes, plan.baseline.dynamic_peak_bytes)
            self.predictions[name] = both if counted else None
        return returned[0]


def _plan_of(planned: Any) -> PlanRecord | None:
    found: PlanRecord | None
    found = installed_plan(planned) if isinstance(planned, nn.Module) else getattr(planned, "plan", None)
    return found


Program = Callable[[Training], dict[str, Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Add a program under its name."""
    PROGRAMS[function.__name__] = function
    return function


def average(mean: nn.Module, model: nn.Module, decay: float = 0.99) -> None:
    """An exponential moving average of weights, and buffers as they are, as most recipes have it."""
    with torch.no_grad():
        for kept, new in zip(mean.parameters(), model.parameters(), strict=True):
            kept.mul_(decay).add_(new, alpha=1 - decay)
        for kept, new in zip(mean.buffers(), model.buffers(), strict=True):
            kept.copy_(new)


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.SiLU) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for wide_in, wide_out in itertools.pairwise(widths):
        layers += [nn.Linear(wide_in, wide_out), activation()]
    return nn.Sequential(*layers[:-1])
