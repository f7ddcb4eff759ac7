"""How far a step that rounds otherwise than eager may be from the same step in double precision.

Inductor fuses operations and rounds differently, with a plan and without; a loss in pieces adds up in another
order. So equality cannot be asked for. The planned step may be a given number of times as far from the exact
step as an unplanned one is.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from planner._torch.execution.in_double_precision import InDoublePrecision
from planner._torch.modules import converted
from planner.module_copies import copied_module, referring_to
from planner.training_step.step import Step, map_tensors
from planner.verification.outcomes import Name, Outcome, distance, same

_ROUNDINGS = 8
"""Differences up to this many roundings of a tensor's largest element count as none."""
_FEW = 64
"""A tensor of fewer elements, such as a loss, may happen to be much nearer to the exact one than its step's
precision is: its error counts as at least the least one, relative, of the tensors of more elements."""


class Yardstick:
    """The outcomes of the step in double precision, and of unplanned steps in the module's own precision.

    Args:
        model: The module, without a plan.
        step: Its step.
        options: Options of Inductor; None where it does not run the plan.
        restore: Puts back the state from which each step begins.
        eager: The outcome of the unplanned eager step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: Step,
        options: Mapping[str, Any] | None,
        restore: Callable[[], None],
        eager: Outcome,
    ) -> None:
        self._eager = eager
        self.problem: str | None = None
        self._exact = self._inductor = eager
        self._times = 1.5 if options is None else 2.0
        how = "by the plan" if options is None else "by Inductor"
        with _first_line_of_errors(self, "in double precision", how):
            restore()
            wide, on_it = _copied(model, step)
            in_double = replace(on_it, args=_double(step.args), kwargs=_double(dict(step.kwargs)))
            with InDoublePrecision():
                self._exact = Outcome(converted(wide, _wide_number), in_double)
        if options is None:
            restore()
            return
        with _first_line_of_errors(self, "with torch.compile, without the plan", how):
            from planner._torch.inductor.compiling import (
                UNLESS_GIVEN,
            )  # Inductor is not imported without need

            restore()
            compiled, on_it = _copied(model, step)
            compiled.compile(options={**UNLESS_GIVEN, **options, "fallback_random": True})
            self._inductor = Outcome(compiled, on_it)
        restore()

    def holds(self, name: Name, planned: torch.Tensor | None) -> bool:
        """Whether a tensor of the planned step is near enough."""
        value = self._eager.tensors[name]
        if same(value, planned, 0.0):
            return True
        if value is None or planned is None or not (value.is_floating_point() or value.is_complex()):
            return False
        exact = self._exact.tensors.get(name)
        if exact is None or planned.shape != value.shape or planned.dtype != value.dtype:
            return False
        error, *others = (
            distance(_wide(t), _wide(exact)) for t in (planned, value, self._inductor.tensors.get(name))
        )
        finite = [e for e in others if not math.isinf(e)]
        largest = _largest(exact)
        if exact.numel() < _FEW:
            finite.append(self._least_error * largest)
        floor = _ROUNDINGS * torch.finfo(value.dtype).eps * largest
        # A value that is zero but for rounding, as the gradient of a bias of keys, may be any of that size.
        times = _ROUNDINGS if max(finite, default=0.0) > largest else self._times
        return error <= times * max(finite, default=0.0) + floor

    @cached_property
    def _least_error(self) -> float:
        """The least error of an unplanned step's tensor of many elements, relative to its largest; 0 without
        such a tensor."""
        errors = list[float]()
        for name, exact in self._exact.tensors.items():
            if exact is not None and exact.numel() >= _FEW and (largest := _largest(exact)):
                unplanned = (self._eager.tensors.get(name), self._inductor.tensors.get(name))
                errors += [distance(_wide(t), _wide(exact)) / largest for t in unplanned]
        return min((e for e in errors if 0.0 < e < math.inf), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    return float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _wide_number(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision, unless its elements are no real or complex numbers."""
    wider: torch.Tensor = _wide(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor
    return wider


def _copied(model: torch.nn.Module, step: Step) -> tuple[Any, Step]:
    """A copy of a module without gradients, and its step."""
    copied = copied_module(model)
    copied.zero_grad(set_to_none=True)
    parts = dict(zip(model.modules(), copied.modules(), strict=False))
    return copied, replace(
        step, loss=referring_to(step.loss, parts), module_losses=step.module_losses_of(copied)
    )


def _double(tree: Any) -> Any:
    def wide(tensor: torch.Tensor) -> torch.Tensor:
        wider = _wide_number(tensor.detach())
        return tensor if wider.dtype is tensor.dtype else wider.requires_grad_(tensor.requires_grad)

    return map_tensors(wide, tree)


@contextlib.contextmanager
def _first_line_of_errors(yardstick: Yardstick, how: str, planned: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the model's code raises there
        line = (str(error).strip().splitlines() or [""])[0]
        yardstick.problem = yardstick.problem or (
            f"the step does not run {how}, and what is computed {planned} cannot be judged: "
            f"{type(error).__name__}: {line}"
        )
