"""The formulas by operator, and the arguments of a call by name."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from planner._torch.operators import OpOverload
from planner._torch.tensors import schema_of
from planner.costs.cuda_scratch.layouts import Layout, layout, maybe
from planner.costs.cuda_scratch.processors import Processor
from planner.training_step.call import Call


class Arguments:
    """Arguments of a call by the names of its schema, defaults included."""

    __slots__ = ("_values",)

    def __init__(self, call: Call) -> None:
        names, defaults = _signature(call.func)
        self._values: dict[str, Any] = {
            **defaults,
            **dict(zip(names, call.args, strict=False)),
            **call.kwargs,
        }

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or a default where the overload has none of that name."""
        return self._values.get(name, default)

    def layout(self, name: str) -> Layout:
        """The layout of an argument that is a tensor."""
        return layout(self._values[name])

    def maybe(self, name: str) -> Layout | None:
        """The layout of an argument that may be no tensor, or not there."""
        return maybe(self._values.get(name))


Formula = Callable[[Arguments, Processor], int]
"""Bytes that a call allocates and frees inside itself, rounded as blocks are."""

FORMULAS: dict[Any, Formula] = {}


def scratch_of(*names: str) -> Callable[[Formula], Formula]:
    """Registers a formula for operators of ``aten``; one that this PyTorch does not have is left out."""

    def register(formula: Formula) -> Formula:
        for name in names:
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None:
                FORMULAS[packet] = formula
        return formula

    return register


@lru_cache(maxsize=1024)
def _signature(func: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = schema_of(func).arguments
    return (
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value()},
    )
