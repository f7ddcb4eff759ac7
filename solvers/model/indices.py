"""The index spaces of the solvers, one type for each.

mypy tells them apart; when the program runs they are plain ints. A conversion such as ``ValueId(3)`` is a
function call, so it does not belong inside a loop: :func:`indices`, :func:`numbered` and :func:`listed` give
whole ranges, enumerations and lists their type at once. :mod:`solvers.model.arrays` names arrays by their
index space.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NewType, Protocol, TypeVar, cast, overload

from numpy import int64
from numpy.typing import NDArray

ValueId = NewType("ValueId", int)
"""A value: its index in ``graph.values``."""

RowId = NewType("RowId", int)
"""An operation in one of its forms: its index in ``graph.ops``, base operations first, then replay forms."""

BaseOp = NewType("BaseOp", RowId)
"""A base operation: a row below ``graph.base_length``, in captured order, forward before backward."""

Region = NewType("Region", int)
"""An execution of a captured graph: only inside its backward can its forward operations be run again."""

Step = NewType("Step", int)
"""A place along a schedule: ``schedule[step]`` is the row that runs there."""

Instance = NewType("Instance", int)
"""One life of a value in a schedule, from a computation of it to the last use: an index of ``Lifetimes``."""

Position = NewType("Position", int)
"""A place at which the forward phase can be cut: position p lies before forward operation p."""

Segment = NewType("Segment", int)
"""A stretch of the forward phase between two positions (*walls*), counted from its start."""

Block = NewType("Block", int)
"""A segment as an element of a chain that is planned as a whole, or one that users checkpoint."""

SlotId = NewType("SlotId", int)
"""A place in time of the exact program, at which a certain row runs or may run."""

Variable = NewType("Variable", int)
"""A variable of an integer or linear program: a column."""

ProgramRow = NewType("ProgramRow", int)
"""A constraint of an integer or linear program: a row of it, which is no row of a graph."""

_Index = TypeVar("_Index", bound=int)
_Key = TypeVar("_Key", bound=int, contravariant=True)
_Item = TypeVar("_Item")
_Entry = TypeVar("_Entry", covariant=True)


class Per(Protocol[_Key, _Entry]):
    """A list or tuple with an entry for each index of a space; ``Per[ValueId, RowId]``: for each value a row.

    mypy checks what it is indexed with, while a plain list takes any int.
    """

    @overload
    def __getitem__(self, index: _Key, /) -> _Entry: ...

    @overload
    def __getitem__(self, index: slice, /) -> Sequence[_Entry]: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[_Entry]: ...


def base_op(number: int) -> BaseOp:
    """The base operation with a number in captured order."""
    return BaseOp(RowId(number))


def indices(space: type[_Index], end: int, begin: int = 0, step: int = 1) -> Sequence[_Index]:  # noqa: ARG001
    """The indices of a space from ``begin`` up to, not including, ``end``: a ``range``."""
    return cast("Sequence[_Index]", range(begin, end, step))


def numbered(space: type[_Index], items: Iterable[_Item], begin: int = 0) -> Iterator[tuple[_Index, _Item]]:  # noqa: ARG001
    """Items with their indices in a space: ``enumerate``."""
    return cast("Iterator[tuple[_Index, _Item]]", enumerate(items, begin))


def listed(space: type[_Index], array: NDArray[int64]) -> list[_Index]:  # noqa: ARG001
    """An array of indices of a space as a list: ``tolist``."""
    return cast("list[_Index]", array.tolist())
