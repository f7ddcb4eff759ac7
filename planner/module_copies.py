"""Copies of modules that hold what cannot be copied, as locks, files, loggers' threads and process groups do.

``copy.deepcopy`` refuses a module for one such attribute. What has neither tensors nor a state that a step
would change belongs to the process, and a copy shares it. A thread's local variables are copied.
"""

import contextlib
import contextvars
import copy
import io
import queue
import socket
import threading
import traceback
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Any
from unittest import mock

import torch

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
_CONTAINERS = ("_modules", "_parameters", "_buffers")


def copied_module(module: torch.nn.Module, replaced: Mapping[int, Any] | None = None) -> torch.nn.Module:
    """A deep copy of a module, which shares with it what cannot be copied.

    Args:
        module: The module.
        replaced: By id: objects in the place of those that are copied.

    Raises:
        Exception: Whatever copying one of its attributes raises.
    """
    with _shared():
        return copy.deepcopy(module, dict(replaced or {}))


def attribute_of(error: BaseException) -> str | None:
    """The attribute of a module that could not be copied, as in ``encoder.0.items``; None: not known."""
    names = [
        str(frame.f_locals["key"])
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "_deepcopy_dict" and "key" in frame.f_locals
    ]
    return ".".join(name for name in names if name not in _CONTAINERS) or None


@contextlib.contextmanager
def _shared() -> Iterator[None]:
    """While this is open, ``copy.deepcopy`` returns such objects themselves."""
    by_type = {**dict.fromkeys(_SHARED_TYPES, _itself), threading.local: _variables_of_threads}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(copy._deepcopy_dispatch, by_type))  # type: ignore[attr-defined]
        for shared in _SHARED_CLASSES:
            stack.enter_context(mock.patch.object(shared, "__deepcopy__", _itself, create=True))
        yield


def _itself(value: Any, _memo: dict[int, Any]) -> Any:
    return value


def _variables_of_threads(value: threading.local, memo: dict[int, Any]) -> threading.local:
    made = memo[id(value)] = threading.local()
    vars(made).update(copy.deepcopy(vars(value), memo))
    return made
