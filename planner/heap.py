"""The interpreter's memory, while much is made that is kept: garbage collector, stack, large files."""

import functools
import gc
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from weakref import ReferenceType

_P = ParamSpec("_P")
_R = TypeVar("_R")
_STACK = 140_000
"""Values, of eight bytes, that a call is said to need room for: its piece is of two megabytes, half free."""

_SELDOM = 10
_lock = threading.Lock()
_setting_aside = 0
"""The number of open contexts, in all threads, that have set objects aside: the last one puts them back."""
_passing_by = 0
"""The number of open contexts that have set nothing aside, as somebody else had frozen objects before."""


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Let the garbage collector pass over all objects that are there already.

    Tracing makes hundreds of thousands of objects, so the collector often goes through all objects of the
    process: libraries, the model, the user's data. Garbage that is made meanwhile is collected as ever. If
    somebody has frozen objects on purpose (see :func:`gc.freeze`), nothing is set aside. Threads may plan at
    once: the objects that one has set aside stay so until all are done.
    """
    with _set_aside(again=False):
        yield


@contextmanager
def garbage_let_go() -> Iterator[None]:
    """Collect at the end the garbage that was made meanwhile; older objects are passed over."""
    with _set_aside(again=True):
        try:
            yield
        finally:
            gc.collect()


@contextmanager
def _set_aside(*, again: bool) -> Iterator[bool]:
    """Set older objects aside, unless somebody has frozen some; yields whether they are set aside.

    Args:
        again: Whether to set aside also the objects made since another context set older ones aside.
    """
    global _setting_aside, _passing_by
    with _lock:
        is_first = not _setting_aside
        # The interpreter counts frozen objects one by one, which takes as long as going through them.
        if is_first and (_passing_by or gc.get_freeze_count()):
            done = False
            _passing_by += 1
        else:
            done = True
            _setting_aside += 1
            if is_first or again:
                gc.freeze()
    try:
        yield done
    finally:
        with _lock:
            if done:
                _setting_aside -= 1
                if not _setting_aside:
                    gc.unfreeze()
            else:
                _passing_by -= 1


@contextmanager
def newer_objects() -> Iterator[Callable[[], list[object]]]:
    """Set older objects aside; meanwhile the collector seldom goes through all objects.

    Yields:
        A function that lists the objects that were made since.
    """
    with _set_aside(again=True) as done, _full_collections_seldom():
        if done:
            yield gc.get_objects
            return
        # Held, so that no other object gets the id of one of them; but for weak references, whose owners
        # trust in their end.
        older = [o for o in gc.get_objects() if not issubclass(type(o), ReferenceType)]
        ids = {id(o) for o in older}
        yield lambda: [o for o in gc.get_objects() if id(o) not in ids and o is not older]
        older.clear()


@contextmanager
def _full_collections_seldom() -> Iterator[None]:
    """Most objects that capturing makes are kept. A full collection of them finds little garbage: such
    collections took a sixth of the time for models of many layers."""
    first, second, third = gc.get_threshold()
    gc.set_threshold(first, second, third * _SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)


@contextmanager
def nothing_set_aside() -> Iterator[None]:
    """Let the garbage collector see all objects, so that ``gc.get_referrers`` finds all holders of one."""
    with _lock:
        ours = _setting_aside > 0
        if not ours and not gc.get_freeze_count():
            users = False
        else:
            users = not ours
            gc.unfreeze()
    try:
        yield
    finally:
        with _lock:
            if users or _setting_aside:
                gc.freeze()


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect no garbage meanwhile: for work that makes many objects and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def made_to_stay() -> Iterator[None]:
    """Collect no garbage meanwhile, and make the new objects count as old: for many objects that are kept.

    Without this the collector would go through them twice before they are old. ``gc.unfreeze`` puts objects
    into the oldest generation.
    """
    with collector_off():
        yield
        with _lock:
            if not (_setting_aside or _passing_by or gc.get_freeze_count()):
                gc.freeze()
                gc.unfreeze()


def room_on_the_stack(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function so that the calls inside of it find room on one chunk of CPython's data stack.

    CPython keeps the variables of calls on chunks of 16 KiB (``DATA_STACK_CHUNK_SIZE``, from 3.11 on). It
    gives a chunk back to the system when the first call on it returns, and asks for one with the next call.
    So calls that go back and forth across the end of a chunk take microseconds each, which was a tenth of
    tracing's time. Here the function's code object asks for a large frame: CPython gets a larger chunk for
    it, and the calls inside use the rest of that. Pages that nobody writes to take no memory.
    """

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_stacksize=_STACK)
    return functools.wraps(function)(run)


def read_at_most(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a file, up to one byte more than `most_bytes`. ``read(n)`` would allocate n bytes."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        known = min(found.st_size, most_bytes) if stat.S_ISREG(found.st_mode) else most_bytes
        return file.read(known + 1)
