"""Executions of a captured graph that are like an earlier one run as a single operation each.

Layers that share a graph run it once each, on tensors without data of the same sizes. The first execution
tells the outcome of the others: results are fresh tensors of the same sizes, and gradients are those of the
operations inside. So later executions skip these operations, and a model of many layers is captured sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.joint import aot
from planner._torch.tensors import dispatch_keys
from planner._torch.versions import version_of
from planner._torch.without_data.plain import facts_of

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


@dataclass
class _Known:
    """The outcome of an execution.

    Attributes:
        results: Sizes, strides, dtype and device of each result.
        differentiable: Which of these have gradients.
    """

    results: list[_Layout]
    differentiable: list[bool]


class AlikeExecutions:
    """Runs a graph on tensors without data.

    An execution whose arguments are like those of an earlier one is a single operation. That is not so where
    the graph changes arguments, or returns views of them, several tensors of one storage, or tensors whose
    values are known.

    Args:
        graph: The graph, as Dynamo captured it.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._known: dict[tuple[Any, ...], _Known | None] = {}
        self._inside: dict[tuple[Any, ...], _Inside] = {}

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        key = _described(args)
        if key is None:
            return list(self._graph(*args))
        known = self._known.get(key)
        if known is None:
            before = [version_of(a) for a in args if isinstance(a, torch.Tensor)]
            results = list(self._graph(*args))
            unchanged = before == [version_of(a) for a in args if isinstance(a, torch.Tensor)]
            if key not in self._known:
                self._known[key] = _known(args, results) if unchanged else None
            return results
        inside = self._inside.get(key)
        if inside is None:
            inside = self._inside[key] = _Inside(self._graph, args, known)
        return list(_OneOperation.apply(inside, *args))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Forget all executions, and let go of their tensors."""
        self._known.clear()
        self._inside.clear()


class _Inside:
    """One run of a graph's operations, kept to differentiate it."""

    def __init__(self, graph: GraphModule, args: Sequence[Any], known: _Known) -> None:
        self.known = known
        self.mode = fake.mode_of(a for a in args if isinstance(a, torch.Tensor))
        with torch.enable_grad():
            self._arguments, _, self._results = aot.run_without_data(graph, args)
        self._gradients: dict[tuple[Any, ...], list[_Layout | None]] = {}

    def gradients(self, arrived: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradient of each argument, given those of the results; None where there is none."""
        key = tuple(None if g is None else (*_layout(g), dispatch_keys(g)) for g in arrived)
        if key not in self._gradients:
            self._gradients[key] = self._differentiated(arrived)
        return [
            None if layout is None else fake.empty_strided(self.mode, *layout)
            for layout in self._gradients[key]
        ]

    def _differentiated(self, arrived: Sequence[torch.Tensor | None]) -> list[_Layout | None]:
        wanted = [a for a in self._arguments if isinstance(a, torch.Tensor) and a.requires_grad]
        given = [(r, g) for r, g in zip(self._results, arrived, strict=True) if g is not None]
        if not given or not wanted:
            return [None] * len(self._arguments)
        results, gradients = zip(*given, strict=True)
        computed = iter(torch.autograd.grad(results, wanted, gradients, retain_graph=True, allow_unused=True))
        passed: list[_Layout | None] = []
        for argument in self._arguments:
            has_one = isinstance(argument, torch.Tensor) and argument.requires_grad
            gradient = next(computed) if has_one else None
            passed.append(None if gradient is None else _layout(gradient))
        return passed


class _OneOperation(torch.autograd.Function):
    """All operations of a graph, as one autograd function."""

    @staticmethod
    def forward(ctx: Any, inside: _Inside, *_args: Any) -> tuple[torch.Tensor, ...]:
        ctx.inside = inside
        ctx.set_materialize_grads(False)
        results = tuple(fake.empty_strided(inside.mode, *layout) for layout in inside.known.results)
        without = [r for r, has in zip(results, inside.known.differentiable, strict=True) if not has]
        ctx.mark_non_differentiable(*without)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *ctx.inside.gradients(gradients))


def _described(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """A key of all facts that an execution's results depend on.

    None where values are among them, where an argument is neither plain tensor nor number, or where no
    argument is a tensor.
    """
    key: list[Any] = [torch.is_grad_enabled()]
    places: dict[int, int] = {}
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            if not isinstance(arg, int | float | bool | str | None):
                return None
            key.append((type(arg), arg))
            continue
        facts = facts_of(arg)
        if facts is None:
            return None
        key.append((facts, places.setdefault(fake.storage_key(arg), len(places))))
    return tuple(key) if places else None


def _known(args: Sequence[Any], results: Sequence[Any]) -> _Known | None:
    given = {fake.storage_key(a) for a in args if isinstance(a, torch.Tensor)}
    if not all(isinstance(r, torch.Tensor) and facts_of(r) is not None and r.numel() for r in results):
        return None
    storages = {fake.storage_key(r) for r in results}
    whole = all(r.storage_offset() == 0 for r in results)
    if len(storages) < len(results) or storages & given or not whole:
        return None
    return _Known([_layout(r) for r in results], [r.requires_grad for r in results])


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
