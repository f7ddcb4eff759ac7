"""Tensors that a step without data computes from numbers alone, computed once more with data.

Tables of positions and masks depend on neither parameters nor inputs nor random numbers. Where a step leaves
such a tensor in a cache of the user's, the user needs its values after planning.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from planner._torch.operators import writes
from planner._torch.tensors import call_tensors

_MARK = "_planner_origin"
_standing_in = False


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """A context whose tensors stand in for others: nothing is known of their values."""
    global _standing_in
    before, _standing_in = _standing_in, True
    try:
        yield
    finally:
        _standing_in = before


@dataclass(frozen=True)
class _Origin:
    """A tensor and its storage, by number: a reference would keep them alive longer than the step does."""

    tensor: int
    storage: int


@dataclass(frozen=True)
class _Call:
    """A call of an operator, with origins in the place of tensors."""

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[_Origin | None, ...]


class DataFreeLog:
    """The calls whose results depend on no data, in their order."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._storages: set[int] = set()
        self._next = 0

    def record(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call that has just been made on tensors without data."""
        if _standing_in or not isinstance(function, torch._ops.OpOverload):
            return
        mutable = writes(function)
        if not mutable and any(isinstance(x, FakeTensor) and not hasattr(x, _MARK) for x in args):
            return  # the quick way out, for nearly every call
        given = call_tensors((args, kwargs))
        tensors = [t for t in given if isinstance(t, FakeTensor)]  # the others have their values
        origins = [self._origin(t) for t in tensors]
        drawn = torch.Tag.nondeterministic_seeded in function.tags
        if drawn or None in origins or _has_symbols(args, kwargs):
            if mutable:
                self._storages -= {o.storage for o in origins if o is not None}
            return
        made = [t for t in tree_leaves(result) if isinstance(t, FakeTensor)]
        if not made or (mutable and len(given) > len(tensors)):
            if mutable:  # what it writes is not known from here on
                self._storages -= {o.storage for o in origins if o is not None}
            return
        known = [(t, o) for t, o in zip(tensors, origins, strict=True) if o is not None]
        storages = {t.untyped_storage()._cdata: o.storage for t, o in known}
        results: list[_Origin | None] = []
        for tensor in made:
            if any(tensor is t for t in tensors):
                results.append(getattr(tensor, _MARK))
                continue
            at = tensor.untyped_storage()._cdata
            if at not in storages:
                storages[at] = self._number()
                self._storages.add(storages[at])
            results.append(_Origin(self._number(), storages[at]))
            setattr(tensor, _MARK, results[-1])
        read = frozenset(o.storage for _, o in known)
        written = frozenset(o.storage for o in results if o is not None)
        if mutable:
            written |= read
        held, named = tree_map_only(FakeTensor, lambda t: getattr(t, _MARK), (args, kwargs))
        self._calls.append(_Call(function, held, named, read, written, tuple(results)))

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the values that this one would have; None where they depend on data."""
        origin = self._origin(tensor)
        if origin is None or not isinstance(tensor, FakeTensor):
            return None
        needed, calls = {origin.storage}, []
        for call in reversed(self._calls):
            if call.writes & needed:
                needed |= call.reads
                calls.append(call)
        made: dict[int, torch.Tensor] = {}
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            for call in reversed(calls):
                args, kwargs = tree_map_only(_Origin, lambda o: made[o.tensor], (call.args, call.kwargs))
                values = [
                    t for t in tree_leaves(call.function(*args, **kwargs)) if isinstance(t, torch.Tensor)
                ]
                for result, value in zip(call.results, values, strict=True):
                    assert result is not None
                    made[result.tensor] = value
        return made[origin.tensor].requires_grad_(tensor.requires_grad)

    def _origin(self, tensor: torch.Tensor) -> _Origin | None:
        origin = getattr(tensor, _MARK, None)
        return origin if isinstance(origin, _Origin) and origin.storage in self._storages else None

    def _number(self) -> int:
        self._next += 1
        return self._next


def _has_symbols(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in tree_leaves((args, kwargs))
    )
