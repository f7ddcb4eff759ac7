"""One run of a training program, with plans or without, and what is seen of its memory."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.nn as nn

import planner
from planner.capture.captured_step import NO_LOSS
from planner.planfile.plan import PlanRecord
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak

Result = TypeVar("Result")
How = Literal["step", "module"]


@dataclass
class Training:
    """What a program plans with and measures by.

    Attributes:
        planned: Whether it trains by plans.
        options: Of ``planner.step`` and ``planner.auto_checkpoint``.
        how: Whether programs plan their steps, or the modules that these are given.
        last: By the name of a part: how many calls of it an earlier run had. The last one is measured: what
            is measured cannot be planned, as plans measure too.
        calls: By the name of a part: its calls so far.
        peaks: By the name of a part: what was measured.
        predictions: By the name of a part: the peaks that its plan predicts with the plan and without it;
            None where it does not count the loss.
        limits: By the name of a part: the most that it may take. That is what its plan predicts, or what is
            left of the budget where inputs are larger than those that were planned.
        modules: Those that have been planned one by one.
        parts_with_plan: The parts that had a plan in their last call.
    """

    planned: bool
    options: dict[str, Any]
    how: How = "step"
    last: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peaks: dict[str, int] = field(default_factory=dict)
    predictions: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    parts_with_plan: set[str] = field(default_factory=set)

    def step(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function, by a plan of its own where this run is planned; or its modules by plans of theirs."""
        if not self.planned:
            return function
        if self.how == "step":
            return planner.step(function, **self.options | options)

        @functools.wraps(function)
        def with_planned_modules(*args: Any, **kwargs: Any) -> Any:
            for model in (*args, *kwargs.values()):
                if not isinstance(model, nn.Module) or model in self.modules:
                    continue
                if any(parameter.requires_grad for parameter in model.parameters()):
                    planner.auto_checkpoint(model, **self.options | options)
                    self.modules.append(model)
            return function(*args, **kwargs)

        return with_planned_modules

    def model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The module, by a plan where this run is planned."""
        return planner.auto_checkpoint(model, **self.options | options) if self.planned else model

    def run(self, of: Callable[..., Any], part: Callable[[], Result], *, sizes_vary: bool = False) -> Result:
        """Run a part of the loop, from the forward to the end of the backward.

        Args:
            of: What is planned of it: its plan is the one whose prediction counts.
            part: What to run, with gradients as they are when a step begins.
            sizes_vary: Whether the last call may have larger inputs than others had.
        """
        name = getattr(of, "__name__", type(of).__name__)
        self.calls[name] += 1
        if self.calls[name] != self.last.get(name):
            return part()
        returned: list[Result] = []
        self.peaks[name] = measure_peak(lambda: returned.append(part()), "cpu").peak_bytes
        plan = _plan_of(of)
        if any(installed_plan(model) is not None for model in self.modules):
            self.parts_with_plan.add(name)
        if plan is not None:
            self.parts_with_plan.add(name)
            predicted, budget = plan.predicted.dynamic_peak_bytes, plan.target.budget_bytes
            # The least that can be reached is another for each size.
            counted = NO_LOSS not in plan.notes and not (sizes_vary and budget is None)
            self.predictions[name] = (predicted, plan.baseline.dynamic_peak_bytes) if counted else None
            left = budget - plan.resident.total if sizes_vary and budget is not None else predicted
            self.limits[name] = max(predicted, left)
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
