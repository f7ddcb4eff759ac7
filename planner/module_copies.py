"""Copies of modules, and functions that refer to the copies.

``copy.deepcopy`` refuses a module for one attribute that cannot be copied, as locks, files, loggers' threads
and process groups are. What has neither tensors nor a state that a step would change belongs to the process,
and a copy shares it. A thread's local variables are copied, and so is what an earlier forward left in
attributes, without its history.
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
"""Of these, not of classes derived from them."""
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
"""Of these, and of classes derived from them."""
_HELD = (dict, list, set, deque, torch.Tensor)
"""What a variable around a function, or a default, may hold of a module's."""
_HOLDS_FUNCTIONS = {dict, list, OrderedDict, defaultdict}
"""Of these, not of classes derived from them: what is looked into for functions."""
_CONTAINERS = ("_modules", "_parameters", "_buffers")
_MAKES_COPIES = (
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__new__",
    "__getnewargs__",
    "__getnewargs_ex__",
)
"""Where a class may say how copies of its objects are made."""
_HOOKS = frozenset(name for name, held in vars(torch.nn.Module()).items() if type(held) is OrderedDict)
"""What each module has for its hooks, nearly always empty: it does not matter which empty one that is."""
_GETS_STATE = torch.nn.Module.__getstate__
KEPT = frozenset((type(None), bool, int, float, complex, str, bytes, type))
"""Of these a copy has the very same."""


def copied_module(module: torch.nn.Module, replaced: Mapping[int, Any] | None = None) -> torch.nn.Module:
    """A deep copy of a module, which shares with it what cannot be copied.

    Functions among its attributes, as one in the place of ``forward``, and its hooks refer to the copy.

    Args:
        module: The module.
        replaced: By id: objects in the place of those that are copied.

    Raises:
        Exception: Whatever copying one of its attributes raises.
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
    """Whether a copy has as many parts, parameters and buffers. Where a class writes and reads the state of
    its objects by itself, it may have others: e3nn writes generated code to bytes, and reading traces it."""
    own = (kind for part in parts_of(module) if (kind := type(part)).__getstate__ is not _GETS_STATE)
    if next(own, None) is None:
        return True
    return all(len(count(module)) == len(count(copied)) for count in (parts_of, parameters_of, buffers_of))


def _change_functions(held: Any, refer: "_Referring", made: set[int]) -> None:
    """Let functions in a copied dictionary or list, and in those inside, refer to copies: hooks are in such.

    Args:
        held: The dictionary or list, which is changed.
        refer: What makes such a function.
        made: By id: what is a copy, and not the user's. Each is looked into once.
    """
    items = held.items() if isinstance(held, dict) else enumerate(held)
    some = [(key, value) for key, value in items if type(value) not in KEPT]
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
    """A function like another, that refers to other modules.

    Looked through are what a ``functools.partial`` holds, defaults, variables around it, global variables
    that it names itself, attributes of the object that it is, or is a method of, and functions there.

    Args:
        function: The function, which stays as it is.
        others: The modules in the place of those that it refers to.
    """
    return _Referring(others)(function)


class _Referring:
    """Makes functions that refer to other modules; each once, as they may refer to each other.

    Args:
        others: The modules in the place of those that functions refer to.
        copies: By id: what variables around functions hold in the place of containers and tensors.
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
        self._made[id(value)] = value  # within itself
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
        copied = self._copies.get(id(content)) if isinstance(content, _HELD) else None
        return self(content) if copied is None else copied

    def _holding(self, value: Any) -> Any:
        """An object whose attributes are another's, but for modules."""
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
    """The attribute of a module that could not be copied, as in ``encoder.0.items``; None: not known."""
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
    """While this is open, ``copy.deepcopy`` returns such objects themselves.

    Args:
        parts: Modules that are copied: a weak reference to one becomes one to its copy.
        make: What makes the copy of one, where its class leaves that to Python.
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
    """Whether a class leaves it to Python how a copy of its objects is made, before it gets its state."""
    usual = all(getattr(kind, name, None) is getattr(torch.nn.Module, name, None) for name in _MAKES_COPIES)
    return usual and kind not in copyreg.dispatch_table


def _module(value: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """What ``copy`` does, without asking each of thousands of modules how to make another."""
    made: torch.nn.Module = object.__new__(type(value))
    memo[id(value)] = made
    state = value.__getstate__()
    if type(value).__getstate__ is _GETS_STATE:  # what the module holds, and nothing else
        own: Any = {}
        _copy_items(state, own, memo)
    else:
        own = copy.deepcopy(state, memo)
    made.__setstate__(own)
    return made


def _module_as_it_is(value: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A module with copies of all attributes, however its class writes and reads the state of its objects."""
    made: torch.nn.Module = object.__new__(type(value))
    memo[id(value)] = made
    _copy_items(vars(value), vars(made), memo)
    return made


def _set(value: set[Any], memo: dict[int, Any]) -> set[Any]:
    made: set[Any] = set()
    memo[id(value)] = made
    made.update(copy.deepcopy(list(value), memo) if value else ())  # each module has one that is empty
    return made


def _dictionary(value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """What ``copy`` does, without a call for each name and number: modules are made of dictionaries."""
    made: dict[Any, Any] = {}
    memo[id(value)] = made
    _copy_items(value, made, memo)
    return made


def _ordered_dictionary(value: "OrderedDict[Any, Any]", memo: dict[int, Any]) -> "OrderedDict[Any, Any]":
    """The same; ``copy`` asks each of them how to copy it, and a module has ten that are empty."""
    made: OrderedDict[Any, Any] = OrderedDict()
    memo[id(value)] = made
    if own := vars(value):
        vars(made).update(copy.deepcopy(own, memo))
    _copy_items(value, made, memo)
    return made


def _copy_items(value: Mapping[Any, Any], made: dict[Any, Any], memo: dict[int, Any]) -> None:
    for key, held in value.items():
        mine = key if type(key) in KEPT else copy.deepcopy(key, memo)
        kind = type(held)
        if kind in KEPT:
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
    made = memo[id(value)] = strided_copy(value.detach())  # PyTorch copies none that has a history
    return made


def _variables_of_threads(value: threading.local, memo: dict[int, Any]) -> threading.local:
    made = memo[id(value)] = threading.local()
    vars(made).update(copy.deepcopy(vars(value), memo))
    return made
