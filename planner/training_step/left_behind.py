"""Tensors without data that a step, while it was planned, left in objects that outlive planning.

Models fill caches: a table of positions in a dictionary of some library, the results of a function under
``functools.lru_cache``. While a step runs without data, it caches tensors without data, and the first real
step would fail on them. Such a tensor is replaced by one with the values that the step would have computed,
where they depend on no data. Else it is taken out of the cache, and a warning says so.

The garbage collector knows who holds what. The search goes through new objects only: those made since
:func:`planner.heap.newer_objects` set the older ones aside. A tensor, or a container of tensors, that an
older object holds has more references than the new objects explain.
"""

import functools
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CellType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import numpy as np
import torch

from planner._torch import fake, tensors
from planner.addresses import addresses
from planner.errors import warn
from planner.heap import collector_off, nothing_set_aside
from planner.training_step.recorder import Event, Storage

_CACHE = type(functools.lru_cache(lambda: None))
_NOTHING = object()
_AT_ONCE = 1000
_RECORDS = {Event, Storage}
"""A recording has one for each operation and each tensor; they hold no objects."""
_CONTAINERS = {dict, OrderedDict, list, set}
"""Most of them are empty: a module has ten for its hooks."""


@dataclass
class LeftBehind:
    """Tensors that older objects may hold.

    Attributes:
        tensors: Tensors without data.
        held: For each of them the objects that have more references than new objects explain: the tensor
            itself, or containers that it is in.
        new: The ids of the new objects, if there are such tensors.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    held: list[list[object]] = field(default_factory=list)
    new: set[int] = field(default_factory=set)


def left_behind(newer: Callable[[], list[object]], result: object, ours: Iterable[object]) -> LeftBehind:
    """Look for tensors without data, made since older objects were set aside, that older objects may hold.

    Args:
        newer: Lists the objects made since then.
        result: The result of planning; tensors that only it holds stay as they are.
        ours: Objects at which the search ends, as a copy of the module.
    """
    gc.collect()
    with collector_off():
        young = [o for o in newer() if (kind := type(o)) not in _RECORDS and (kind not in _CONTAINERS or o)]
        return _left_behind(young, result, ours)


def _left_behind(young: list[object], result: object, ours: Iterable[object]) -> LeftBehind:
    holders = _Holders(young)
    own = {id(result), *(id(o) for o in ours)}
    skipped: dict[int, bool] = {}

    def skip(at: int) -> bool:
        # Few of the new objects are ever reached from a tensor.
        if at not in skipped:
            skipped[at] = id(young[at]) in own or _is_internal(young[at])
        return skipped[at]

    def held_above(first: list[int]) -> list[int]:
        """The objects, of these and their holders, that have more references than new objects explain."""
        seen, pending, held = set(first), first, []
        while pending:
            at = pending.pop()
            # Two references more: the list `young`, and the argument of getrefcount.
            held_by = holders[at]
            if sys.getrefcount(young[at]) > len(held_by) + 2 + _references_of_pytorch(young[at]):
                held.append(at)
            more = [m for m in held_by if m not in seen and not skip(m)]
            seen.update(more)
            pending += more
        return held

    made = [n for n in range(len(young)) if _without_data(young[n]) and id(young[n]) not in own]
    # First for all of them at once: hardly ever is one held.
    found = [(n, held) for n in made if (held := held_above([n]))] if held_above([*made]) else []
    left = LeftBehind(
        [t for n, _ in found if isinstance(t := young[n], torch.Tensor)],
        [[young[at] for at in held] for _, held in found],
        {*addresses(young).tolist()} if found else set(),
    )
    young.clear()
    return left


class _Holders:
    """For each of some objects, the places of those among them that refer to it, once for each reference.

    ``gc.get_referents`` returns one list of what all its arguments refer to. A mark between two arguments
    tells where the referents of the next begin. So one call answers for many objects: a call costs more than
    its result where audit hooks are installed.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        numbers = addresses(objects)
        order = np.argsort(numbers)
        known = numbers[order]
        end = object()
        ends = (end,)
        holding, held = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for first in range(0, len(objects), _AT_ONCE):
            some = objects[first : first + _AT_ONCE]
            marked: list[object] = [ends] * (2 * len(some))
            marked[::2] = some
            referents = gc.get_referents(*marked)
            referred = addresses(referents)
            place = np.minimum(np.searchsorted(known, referred), len(known) - 1)
            among = known[place] == referred
            holding.append((first + np.cumsum(referred == id(end)))[among])
            held.append(order[place[among]])
        of = np.concatenate(held)
        by_object = np.argsort(of, kind="stable")
        self._holding = np.concatenate(holding)[by_object]
        self._first = np.searchsorted(of[by_object], np.arange(len(objects) + 1))

    def __getitem__(self, at: int) -> list[int]:
        holding: list[int] = self._holding[self._first[at] : self._first[at + 1]].tolist()
        return holding


def put_right(left: LeftBehind, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace tensors without data where older objects hold them.

    Args:
        left: The tensors.
        value_of: The tensor with data, or None if that is not known.
    """
    if left.tensors:
        with nothing_set_aside():
            _put_right(left, value_of)


def _put_right(left: LeftBehind, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    own: list[object] = [left.tensors, *left.held]
    while left.tensors:
        tensor, held = left.tensors.pop(), left.held.pop()
        value = value_of(tensor)
        holder, member = _older_holder(held, left, own, but_caches=True)
        if holder is None:
            holder, member = _older_holder(held, left, own)
            if value is None and (cache := _cache_of(holder)) is not None:
                cache.cache_clear()
                holder = None
        elif value is None:
            warn(
                "planning ran the step without data, and the step keeps a tensor that depends on data in "
                f"{_called(holder, member)}: it was taken out"
            )
        if holder is not None and not _replace(tensor, _NOTHING if value is None else value, own):
            warn(
                "planning ran the step without data, and a tensor without data is left in "
                f"{_called(holder, member)}, where it cannot be taken out: build that anew before training"
            )


def _older_holder(
    held: Sequence[object], left: LeftBehind, own: list[object], *, but_caches: bool = False
) -> tuple[object, object]:
    """The first older object that holds one of some objects, and that one; or None twice."""
    for member in held:  # one by one: a list of all holders would hold them, too
        for holder in gc.get_referrers(member):
            if holder is not held and _is_older(holder, left, own) and not (but_caches and _cache_of(holder)):
                return holder, member
    return None, None


def _cache_of(holder: object) -> Any:
    """The ``functools.lru_cache`` that an object is, or whose dictionary it is; or None.

    Such a cache can be cleared: its function computes the values again.
    """
    if isinstance(holder, _CACHE):
        return holder
    referrers = gc.get_referrers(holder) if isinstance(holder, dict) else ()
    return next((h for h in referrers if isinstance(h, _CACHE)), None)


def _is_older(holder: object, left: LeftBehind, own: list[object]) -> bool:
    return id(holder) not in left.new and not any(holder is o for o in own) and not _is_internal(holder)


def _replace(old: Any, new: Any, own: list[object]) -> int:
    """Put another object in the place of one, wherever it is held; returns the number of places."""
    holders = gc.get_referrers(old)
    own = [*own, holders]
    places = 0
    for holder in holders:
        if any(holder is o for o in own) or _is_internal(holder):
            continue
        if isinstance(holder, tuple):
            places += _replace(holder, _NOTHING if new is _NOTHING else _like(holder, old, new), own)
        elif isinstance(holder, _CACHE):
            holder.cache_clear()
            places += 1
        elif isinstance(holder, CellType):
            holder.cell_contents = None if new is _NOTHING else new
            places += 1
        else:
            places += _replace_in(holder, old, new)
    return places


def _replace_in(holder: Any, old: Any, new: Any) -> int:
    value = None if new is _NOTHING else new
    at: list[Any]
    if isinstance(holder, list | deque):
        at = [n for n, member in enumerate(holder) if member is old][::-1]
        for n in at:
            if new is _NOTHING:
                del holder[n]
            else:
                holder[n] = new
    elif isinstance(holder, set):
        at = [0] * (old in holder)
        holder.discard(old)
        holder |= set() if new is _NOTHING else {new}
    elif isinstance(holder, dict):
        at = [key for key, member in holder.items() if member is old]
        owner = _owner(holder)
        for key in at:
            if isinstance(owner, type):
                setattr(owner, key, value)
            elif new is _NOTHING and owner is None and "__name__" not in holder:
                del holder[key]
            else:  # attributes, and variables of files, stay there
                holder[key] = value
    else:
        at = [name for name in _names(holder) if getattr(holder, name, None) is old]
        for name in at:
            setattr(holder, name, value)
    return len(at)


def _names(value: object) -> list[str]:
    """The names of an object's own attributes."""
    slots = [slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ())]
    return [*(_attributes(value) or {}), *slots]


def _attributes(value: object) -> Any:
    try:
        return value.__dict__
    except Exception:  # it has none, or stands in for another object
        return None


def _owner(space: dict[Any, Any]) -> Any:
    """The object, or the class, whose attributes a dictionary is."""
    for holder in gc.get_referrers(space):
        if _attributes(holder) is space:
            return holder
        if isinstance(holder, type) and any(held is space for held in gc.get_referents(holder)):
            return holder
    return None


def _called(holder: Any, member: Any) -> str:
    """Where a holder holds an object, in words: a variable of a file, or an attribute of a class."""
    if isinstance(holder, dict):
        if "__name__" in holder:
            return next((f"{holder['__name__']}.{name}" for name, v in holder.items() if v is member), "")
        key = next((key for key, value in holder.items() if value is member), "")
        for owner in gc.get_referrers(holder):
            if isinstance(owner, dict) and "__name__" in owner:
                return f"{_called(owner, holder)}[{key!r}]"
        if (owner := _owner(holder)) is not None:
            kind = owner if isinstance(owner, type) else type(owner)
            return f"{kind.__module__}.{kind.__qualname__}.{key}"
    names = [name for name in _names(holder) if getattr(holder, name, None) is member]
    return ".".join([type(holder).__module__, type(holder).__qualname__, *names[:1]])


def _like(holder: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    members = [new if member is old else member for member in holder]
    return type(holder)._make(members) if hasattr(holder, "_make") else type(holder)(members)


def _references_of_pytorch(value: object) -> int:
    return int(issubclass(type(value), torch.Tensor) and tensors.held_by_pytorch(value))


def _without_data(value: object) -> bool:
    # Not isinstance: it reads __class__, which may fail on an object that stands in for another.
    return issubclass(type(value), torch.Tensor) and fake.is_fake(value)


def _is_internal(value: Any) -> bool:
    """Whether an object is PyTorch's, ours or the interpreter's. Objects of ``torch.nn`` are the user's."""
    if _without_data(value):
        return False
    if issubclass(type(value), FrameType | TracebackType):
        return True
    if issubclass(type(value), FunctionType):
        name = value.__module__
    else:
        name = value.__name__ if issubclass(type(value), ModuleType) else type(value).__module__
    return str(name).partition(".")[0] in ("torch", "planner") and not str(name).startswith("torch.nn.")
