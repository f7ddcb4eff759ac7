"""A graph of symbolic sizes, compiled for numbers instead.

Some operators cannot be traced at symbolic sizes, others are traced into other operators, and the strides of
gradients are not known there. Such a graph is compiled for each shape that comes, up to a number of shapes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_SHAPES = 8
"""The most shapes that one graph is compiled for."""


class StaticShapes:
    """The callable of a graph that is compiled once for each shape of its inputs.

    Args:
        compile_: Compiles the graph for inputs with data.
        otherwise: Runs the graph for all further shapes.
        beyond: Called once for each further shape, with its sizes.
    """

    def __init__(
        self,
        compile_: Callable[[Sequence[Any]], Callable[..., Any]],
        otherwise: Callable[..., Any],
        beyond: Callable[[str], None],
    ) -> None:
        self._compile, self._otherwise, self._beyond = compile_, otherwise, beyond
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._warned: set[tuple[Any, ...]] = set()

    def __call__(self, *args: Any) -> Any:
        key = tuple(a for a in args if not isinstance(a, torch.Tensor))
        run = self._compiled.get(key)
        if run is None and len(self._compiled) < MOST_SHAPES:
            run = self._compiled[key] = self._compile(args)
        if run is not None:
            return run(*args)
        if key not in self._warned:
            self._warned.add(key)
            self._beyond(", ".join(map(str, key)))
        return self._otherwise(*args)
