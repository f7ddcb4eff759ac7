"""Outcomes of steps, kept on the host: losses, gradients, buffers; and how far two of them are apart."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from planner._torch.tensors import all_hooks_on
from planner.training_step.generators import GeneratorStates
from planner.training_step.snapshot import on_host
from planner.training_step.step import Step, differentiable_outputs, tensors_in

Name = tuple[str, str]
"""The kind of a tensor ("loss", "gradient of", "parameter" or "buffer"), and its name."""


class Outcome:
    """The tensors that a step leaves, as copies that the next step cannot change.

    Attributes:
        tensors: Losses, gradients, buffers, and parameters with hooks; None for a gradient that is not there.
        rng: The states of the default random generators, and of those that are given.
    """

    def __init__(self, model: torch.nn.Module, step: Step, generators: Sequence[Any] = ()) -> None:
        output, loss = step.run(model)
        losses = [loss] if loss is not None else differentiable_outputs(output)
        self.tensors: dict[Name, torch.Tensor | None] = {
            name: None if tensor is None else on_host(tensor) for name, tensor in _left(model, step, losses)
        }
        self.rng = GeneratorStates.now(generators)


def _left(
    model: torch.nn.Module, step: Step, losses: Sequence[torch.Tensor]
) -> Iterator[tuple[Name, torch.Tensor | None]]:
    for i, loss in enumerate(losses):
        yield ("loss", str(i)), loss
    for name, parameter in model.named_parameters():
        yield ("gradient of", name), parameter.grad
        if all_hooks_on(parameter):  # a hook may step an optimizer and free the gradient
            yield ("parameter", name), parameter
    for i, tensor in enumerate(tensors_in((step.args, dict(step.kwargs)))):
        if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad):
            yield ("gradient of", f"input {i}"), tensor.grad
    for name, buffer in model.named_buffers():
        yield ("buffer", name), buffer


class Spread:
    """How far unplanned steps are from the first of them, tensor by tensor.

    Args:
        reference: The outcome of the first.
        allowed: Whether kernels of the device may differ from run to run, as CUDA's do, which sum in any
            order. On the CPU kernels do not: a tensor that differs there depends on a state that cannot be
            put back. Also an attribute.
    """

    def __init__(self, reference: Outcome, allowed: bool) -> None:
        self._reference, self.allowed = reference, allowed
        self._differs: set[Name] = set()
        self._most: dict[Name, float] = {}
        self._accepted: set[Name] = set()

    def add(self, again: Outcome) -> None:
        """Add the outcome of another unplanned step."""
        for name, value in self._reference.tensors.items():
            repeated = again.tensors.get(name)
            if not self.allowed:
                apart = 0.0 if same(value, repeated, 0.0) else math.inf
            else:
                apart = distance(value, repeated)
            if math.isinf(apart):
                self._differs.add(name)
            elif apart > 0.0:
                self._most[name] = max(self._most.get(name, 0.0), apart)

    def agrees(self, name: Name, other: Outcome) -> bool:
        """Whether a tensor of another step is no further from the first step's than unplanned steps' are."""
        expected, actual = self._reference.tensors.get(name), other.tensors.get(name)
        return name in self._accepted or same(expected, actual, self.of(name))

    def differing(self, other: Outcome) -> list[Name]:
        """The tensors of another step that are further from the first step's."""
        return [name for name in self._reference.tensors if not self.agrees(name, other)]

    def accept(self, names: Sequence[Name], outcomes: Sequence[Outcome]) -> None:
        """Count as equal the tensors that are equal bit for bit in all steps under deterministic kernels.

        Args:
            names: The tensors to compare.
            outcomes: The outcomes of such steps, unplanned and planned.
        """
        first, *others = outcomes
        for name in names:
            value = first.tensors.get(name)
            if self.allowed and all(same(value, other.tensors.get(name), 0.0) for other in others):
                self._accepted.add(name)

    def exact(self, name: Name) -> bool:
        """Whether a tensor was compared bit for bit."""
        return name not in self._accepted and self.of(name) == 0.0

    def of(self, name: Name) -> float:
        """The most that an unplanned step's tensor was apart from the first one's; 0 where it never was."""
        return self._most.get(name, 0.0)

    def incomparable(self, name: Name) -> bool:
        """Whether a tensor differs between unplanned steps by more than another order of sums can."""
        return name in self._differs


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The most that two elements are apart.

    It is infinite where shapes, types or layouts differ, where NaNs or infinities are in other places, and
    between booleans that differ.
    """
    if same(a, b, 0.0):
        return 0.0
    if a is None or b is None or _kind(a) != _kind(b) or a.dtype is torch.bool:
        return math.inf
    a, b = (_wide(t) for t in (a, b))
    most = float((a - b).abs().max())
    if math.isfinite(most):  # no NaN and no infinity is in either
        return most
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not same(a[~finite], b[~finite], 0.0):
        return math.inf
    return float((a[finite] - b[finite]).abs().max())


def same(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float) -> bool:
    """Whether two tensors are equal, NaNs in the same places included, or ten times `tolerance` apart."""
    if a is None or b is None:
        return a is b
    if _kind(a) != _kind(b):
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    if tolerance > 0.0 and a.dtype is not torch.bool:
        return bool(torch.allclose(_wide(a), _wide(b), rtol=1e-5, atol=10 * tolerance, equal_nan=True))
    nan = a.isnan()
    return bool(nan.any()) and torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])


def difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """Two tensors that are not the same, in words: without and with the plan."""
    if a is None or b is None:
        kinds = ["None" if t is None else "a tensor" for t in (a, b)]
        return f"{kinds[0]} without the plan, {kinds[1]} with it"
    if _kind(a) != _kind(b):
        return f"{_kind(a)} without the plan, {_kind(b)} with it"
    a, b = (_wide(t) for t in (a, b))
    apart = (a - b).abs().nan_to_num(math.inf)
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return f"{int((apart > 0).sum()):,} of {a.numel():,} elements, by at most {float(apart.max()):.3g}"


def _kind(tensor: torch.Tensor) -> str:
    """The shape, type and, where it is not dense, layout: optimizers treat sparse gradients differently."""
    layout = "" if tensor.layout is torch.strided else f", {str(tensor.layout).removeprefix('torch.')}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{layout}"


def _wide(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
