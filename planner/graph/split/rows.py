"""Rows of a tensor, and how an operation is computed for some of them.

The rows of a tensor are one or several of its dimensions that lie beside each other: (batch, sequence) of
logits of (batch, sequence, vocabulary). In a piece they are one dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch.fx import Node


class Rows(NamedTuple):
    """The dimensions of a tensor that are rows, from `start` to before `end`, once the slices of rows that
    `parts` lists are taken of those that the run begins with."""

    start: int
    end: int
    parts: tuple["Part", ...] = ()

    def of(self, sizes: Sequence[int]) -> Sequence[int]:
        """The sizes of the dimensions that are rows."""
        return sizes[self.start : self.end]

    def moved(self, by: int) -> "Rows":
        """The same rows, as many dimensions further on."""
        return self._replace(start=self.start + by, end=self.end + by)

    def at(self, dim: int) -> bool:
        """Whether a dimension is one of the rows."""
        return self.start <= dim < self.end

    def dim(self, dim: int) -> int:
        """Where a dimension that is none of the rows is in a piece."""
        return dim if dim < self.start else dim - (self.end - self.start - 1)

    def sizes(self, sizes: Sequence[int], rows: int) -> list[int]:
        """The sizes of a piece of so many rows."""
        return [*sizes[: self.start], rows, *sizes[self.end :]]


class Part(NamedTuple):
    """A slice of rows, of which a dimension is sliced: the sizes of all their dimensions before, and the
    dimension, first and last of what is taken."""

    sizes: tuple[int, ...]
    dim: int
    begin: int
    end: int


Kind = Literal["rows", "product", "several", "sum", "mean"]
"""The kind of a result: rows; rows that a product with a weight made; several results, each of which is taken
by itself; or a sum or a mean over all rows."""


@dataclass(frozen=True)
class Piecewise:
    """How an operation is computed for some rows.

    Attributes:
        kind: The kind of its result.
        rows: The rows of its result; None if it has none.
        operands: Its operands from outside of the run that have rows, and the place of these.
        args: Given a number of rows, its arguments in a piece of that many. Nodes are the joint graph's.
        target: The operator in a piece.
        kwargs: Its arguments by name.
        count: Of a mean, the number of all elements that are averaged.
        added: Whether it is a product that sums over rows.
    """

    kind: Kind
    rows: Rows | None
    args: Callable[[int], tuple[Any, ...]]
    target: Any
    operands: Mapping[Node, Rows] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    added: bool = False


Known = Mapping[Node, Rows]
"""By value of a run, as far as it is known: the place of its rows."""
