"""Copies of modules, and functions that refer to the copies.

``copy.deepcopy`` refuses a module for one attribute that cannot be copied: a lock, a file, a logger's thread,
a process group. Such objects hold no tensors and no state that a step changes, so a copy shares them with the
original. ``threading.local`` objects are copied with the variables of this thread. Tensors that an earlier
forward left in attributes are copied without their history.
"""

import contextlib
import contextvars
import copy
import copyreg
import functools
import io
import queue
import socket
import threading
import traceback
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor
from typing import Any
from unittest import mock

import torch

from planner._torch.tensors import strided_copy
from planner.addresses import addresses
from planner.module_parts import buffers_of, parameters_of, parts_of

_SHARED_TYPES: tuple[type, ...] = (
    types.ModuleType,
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    memoryview,
    *(type(make()) for make in (threading.Lock, threading.RLock, queue.SimpleQueue)),
    contextvars.ContextVar,
    contextvars.Context,
    io.FileIO,
    io.BufferedReader,
    io.BufferedWriter,
    io.BufferedRandom,
    io.TextIOWrapper,
)
"""Types whose objects a copy shares; those of derived classes are copied."""
_SHARED_CLASSES: tuple[type, ...] = (
    threading.Thread,
    queue.Queue,
    socket.socket,
    Executor,
    *(
        getattr(torch.distributed, name)
        for name in ("ProcessGroup", "Store")
        if torch.distributed.is_available()
    ),
)
"""Classes whose objects a copy shares, those of derived classes too."""
_STATE_TYPES = (dict, list, set, deque, torch.Tensor)
"""Types of a module's state that a function may hold too, in a default or a variable of its closure."""
_HOLDS_FUNCTIONS = {dict, list, OrderedDict, defaultdict}
"""Types of containers in which functions are looked for; derived classes do not count."""
_CONTAINERS = ("_modules", "_parameters", "_buffers")
"""Attributes of a module whose names are left out of paths like ``encoder.0.items``."""
_MAKES_COPIES = (
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__new__",
    "__getnewargs__",
    "__getnewargs_ex__",
)
"""Methods by which a class decides how its objects are copied."""
_HOOKS = frozenset(name for name, held in vars(torch.nn.Module()).items() if type(held) is OrderedDict)
"""The attributes in which a module keeps its hooks. Nearly all are empty, and copied as new ones."""
_GETS_STATE = torch.nn.Module.__getstate__
IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes, type))
"""Types of objects that never change: a copy has the same objects."""


def copied_module(module: torch.nn.Module, replaced: Mapping[int, Any] | None = None) -> torch.nn.Module:
    """A deep copy of a module, which shares the objects that cannot be copied.

    Its hooks, and functions among its attributes, as one that replaces ``forward``, refer to the copy.

    Args:
        module: The module.
        replaced: By the id of an object: the object that the copy has in its place.

    Raises:
        Exception: Any that copying one of the attributes raises.
    """
    memo: dict[int, Any] = dict(replaced or {})
    with _shared(set(parts_of(module)), _module):
        copied = copy.deepcopy(module, memo)
    if not _has_as_much(module, copied):
        again: dict[int, Any] = dict(replaced or {})
        with contextlib.suppress(Exception), _shared(set(parts_of(module)), _module_as_it_is):
            as_it_is = copy.deepcopy(module, again)
            if _has_as_much(module, as_it_is):
                copied, memo = as_it_is, again
    others: dict[Any, Any] = dict(zip(parts_of(module), parts_of(copied), strict=False))
    refer, made = _Referring(others, memo), {*addresses([*memo.values()]).tolist()}
    for mine in set(others.values()) - set(others):  # a __deepcopy__ may return the module itself
        _change_functions(vars(mine), refer, made)
    return copied


def _has_as_much(module: torch.nn.Module, copied: torch.nn.Module) -> bool:
    """Whether a copy has as many parts, parameters and buffers. It may have others if a class has a
    ``__getstate__`` of its own: e3nn's writes generated code as bytes, which its ``__setstate__`` traces."""
    own = (kind for part in parts_of(module) if (kind := type(part)).__getstate__ is not _GETS_STATE)
    if next(own, None) is None:
        return True
    return all(len(count(module)) == len(count(copied)) for count in (parts_of, parameters_of, buffers_of))


def _change_functions(held: Any, refer: "_Referring", made: set[int]) -> None:
    """Make functions in a copied dictionary or list refer to copies, also in nested ones, as hooks are.

    Args:
        held: The dictionary or list, which is changed.
        refer: Makes the function that refers to copies.
        made: Ids of the copied objects: the user's own are left alone. Each is looked into once, and removed.
    """
    items = held.items() if isinstance(held, dict) else enumerate(held)
    some = [(key, value) for key, value in items if type(value) not in IMMUTABLE]
    for key, value in [(k, v) for k, v in some if type(v) not in _HOLDS_FUNCTIONS or v]:
        kind = type(value)
        if isinstance(value, types.FunctionType | functools.partial):
            held[key] = refer(value)
        elif kind is tuple and any(isinstance(v, types.FunctionType) for v in value):
            held[key] = tuple(refer(v) if isinstance(v, types.FunctionType) else v for v in value)
        elif kind in _HOLDS_FUNCTIONS and id(value) in made:
            made.remove(id(value))
            _change_functions(value, refer, made)


def referring_to(function: Any, others: Mapping[torch.nn.Module, torch.nn.Module]) -> Any:
    """A copy of a function that refers to other modules; the function itself if it refers to none of them.

    Modules are replaced in the function's defaults, in the variables of its closure, in the global variables
    that its code names, in the arguments of a ``functools.partial``, in the attributes of the object that it
    is or is a method of, and in functions found there.

    Args:
        function: The function, which is not changed.
        others: By module: the one to refer to instead.
    """
    return _Referring(others)(function)


def holding(value: Any, others: Mapping[torch.nn.Module, torch.nn.Module]) -> Any:
    """A copy of an object, of the same attributes, that has other modules among them; the object itself if it
    has none of them.

    Args:
        value: The object, which is not changed.
        others: By module: the one to have instead.
    """
    return _Referring(others)._holding(value)


class _Referring:
    """Makes functions that refer to other modules; each once, as they may refer to each other.

    Args:
        others: By module: the one to refer to instead.
        copies: By id of a container or tensor: the copy that a function's default or closure gets instead.
    """

    def __init__(
        self, others: Mapping[torch.nn.Module, torch.nn.Module], copies: Mapping[int, Any] | None = None
    ) -> None:
        self._others, self._copies = others, copies or {}
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return self._others.get(value, value)
        if id(value) in self._made:
            return self._made[id(value)]
        self._made[id(value)] = value  # until it is made: what refers to itself would not end
        if isinstance(value, types.MethodType):
            of = value.__self__
            holder = self(of) if isinstance(of, torch.nn.Module) else self._holding(of)
            made: Any = value if holder is of else types.MethodType(value.__func__, holder)
        elif isinstance(value, functools.partial):
            keywords = {name: self(v) for name, v in value.keywords.items()}
            function, arguments = self(value.func), tuple(map(self, value.args))
            same = function is value.func and _same(arguments, value.args)
            same = same and _same(keywords.values(), value.keywords.values())
            made = value if same else functools.partial(function, *arguments, **keywords)
        elif isinstance(value, types.FunctionType):
            made = self._function(value)
        else:
            made = self._holding(value) if callable(value) else value
        self._made[id(value)] = made
        return made

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(map(self._cell, function.__closure__ or ()))
        variables = function.__globals__
        named = {n: variables[n] for n in function.__code__.co_names if n in variables}
        changed = {n: v for n, v in named.items() if isinstance(v, torch.nn.Module) and v in self._others}
        defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
        own_defaults = tuple(map(self._held, defaults))
        own_by_name = {n: self._held(v) for n, v in by_name.items()}
        same = _same(cells, function.__closure__ or ()) and _same(own_defaults, defaults)
        if same and _same(own_by_name.values(), by_name.values()) and not changed:
            return function
        if changed:
            variables = {**variables, **{n: self._others[v] for n, v in changed.items()}}
        name = function.__name__
        made = types.FunctionType(function.__code__, variables, name, own_defaults or None, cells)
        made.__kwdefaults__, made.__qualname__ = own_by_name or None, function.__qualname__
        vars(made).update({n: self(v) for n, v in vars(function).items()})  # Dynamo marks functions by these
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        found = self._held(content)
        return cell if found is content else types.CellType(found)

    def _held(self, content: Any) -> Any:
        """What a variable or default of a function holds, or the copy of it."""
        copied = self._copies.get(id(content)) if isinstance(content, _STATE_TYPES) else None
        return self(content) if copied is None else copied

    def _holding(self, value: Any) -> Any:
        """An object with the attributes of another, but for modules that are replaced."""
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict):
            return value
        changed = {n: v for n, v in held.items() if isinstance(v, torch.nn.Module) and v in self._others}
        if not changed:
            return value
        try:
            made = object.__new__(type(value))  # nothing of the user's runs
        except TypeError:  # its class is not written in Python
            return value
        vars(made).update({**held, **{n: self._others[v] for n, v in changed.items()}})
        return made


def _same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(these, those, strict=True))


def attribute_of(error: BaseException) -> str | None:
    """The path of the attribute that could not be copied, as in ``encoder.0.items``; None if it is not known.

    :func:`_copy_items` calls itself for each level: its variable `key` in each frame of the traceback is a
    part of the path."""
    names = [
        str(frame.f_locals["key"])
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is _copy_items.__code__
    ]
    return ".".join(name for name in names if name not in _CONTAINERS) or None


@contextlib.contextmanager
def _shared(
    parts: Set[torch.nn.Module], make: Callable[[Any, dict[int, Any]], torch.nn.Module]
) -> Iterator[None]:
    """Within this context ``copy.deepcopy`` returns shared objects themselves, and copies modules by `make`.

    ``copy`` lets nobody pass functions for types, so those in its private table are replaced meanwhile.

    Args:
        parts: The modules that are copied. A weak reference to one is copied as one to its copy.
        make: Makes the copy of a module whose class does not decide itself how it is copied.
    """

    def reference(value: "weakref.ref[Any]", memo: dict[int, Any]) -> Any:
        to = value()
        if not isinstance(to, torch.nn.Module) or to not in parts:
            return value
        return type(value)(copy.deepcopy(to, memo))

    by_type: dict[type, Any] = dict.fromkeys(_SHARED_TYPES, _itself)
    by_type |= {threading.local: _variables_of_threads, torch.Tensor: _tensor, weakref.ref: reference}
    by_type |= {dict: _dictionary, OrderedDict: _ordered_dictionary, set: _set}
    by_type |= dict.fromkeys(filter(_made_as_usual, {type(part) for part in parts}), make)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(copy._deepcopy_dispatch, by_type))  # type: ignore[attr-defined]
        for shared in _SHARED_CLASSES:
            stack.enter_context(mock.patch.object(shared, "__deepcopy__", _itself, create=True))
        yield


def _itself(value: Any, _memo: dict[int, Any]) -> Any:
    return value


def _made_as_usual(kind: type[torch.nn.Module]) -> bool:
    """Whether a class leaves it to Python how its objects are copied, but for their state."""
    usual = all(getattr(kind, name, None) is getattr(torch.nn.Module, name, None) for name in _MAKES_COPIES)
    return usual and kind not in copyreg.dispatch_table


def _module(value: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """Copy a module as ``copy`` does, in less time: nothing is asked of its class but the state."""
    made: torch.nn.Module = object.__new__(type(value))
    memo[id(value)] = made
    state = value.__getstate__()
    if type(value).__getstate__ is _GETS_STATE:  # the state is the module's dictionary of attributes
        own: Any = {}
        _copy_items(state, own, memo)
    else:
        own = copy.deepcopy(state, memo)
    made.__setstate__(own)
    return made


def _module_as_it_is(value: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """Copy all attributes of a module, past its class's ``__getstate__`` and ``__setstate__``."""
    made: torch.nn.Module = object.__new__(type(value))
    memo[id(value)] = made
    _copy_items(vars(value), vars(made), memo)
    return made


def _set(value: set[Any], memo: dict[int, Any]) -> set[Any]:
    made: set[Any] = set()
    memo[id(value)] = made
    made.update(copy.deepcopy(list(value), memo) if value else ())  # nearly always empty
    return made


def _dictionary(value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """Copy a dictionary as ``copy`` does, in less time: without a call for each name and number."""
    made: dict[Any, Any] = {}
    memo[id(value)] = made
    _copy_items(value, made, memo)
    return made


def _ordered_dictionary(value: "OrderedDict[Any, Any]", memo: dict[int, Any]) -> "OrderedDict[Any, Any]":
    """The same for an ordered one. A module has ten that are empty, and ``copy`` is slow with each."""
    made: OrderedDict[Any, Any] = OrderedDict()
    memo[id(value)] = made
    if own := vars(value):
        vars(made).update(copy.deepcopy(own, memo))
    _copy_items(value, made, memo)
    return made


def _copy_items(value: Mapping[Any, Any], made: dict[Any, Any], memo: dict[int, Any]) -> None:
    for key, held in value.items():
        mine = key if type(key) in IMMUTABLE else copy.deepcopy(key, memo)
        kind = type(held)
        if kind in IMMUTABLE:
            made[mine] = held
        elif kind is OrderedDict and not held and mine in _HOOKS:
            made[mine] = OrderedDict()
        elif (known := memo.get(id(held))) is not None:
            made[mine] = known
        elif kind is dict:
            made[mine] = _dictionary(held, memo)
        else:
            made[mine] = copy.deepcopy(held, memo)


def _tensor(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if value.grad_fn is None:
        return value.__deepcopy__(memo)  # type: ignore[no-any-return]
    # ``Tensor.__deepcopy__`` refuses a tensor with a history (``torch/_tensor.py``).
    made = memo[id(value)] = strided_copy(value.detach())
    return made


def _variables_of_threads(value: threading.local, memo: dict[int, Any]) -> threading.local:
    made = memo[id(value)] = threading.local()
    vars(made).update(copy.deepcopy(vars(value), memo))
    return made
