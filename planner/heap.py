"""The garbage collector, while much is made that is kept."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ReferenceType

_set_aside = False
_SELDOM = 10


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Let the garbage collector pass over all objects that are there already.

    Tracing makes hundreds of thousands of objects, and with every so many the collector goes through all
    that the process has: libraries, the model, the user's data. Garbage that is made meanwhile is collected
    as ever. Where somebody has frozen objects on purpose (see :func:`gc.freeze`), nothing is set aside.
    """
    global _set_aside
    # The interpreter counts frozen objects one by one, which takes as long as going through them.
    if _set_aside or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    _set_aside = True
    try:
        yield
    finally:
        _set_aside = False
        gc.unfreeze()


@contextmanager
def garbage_let_go() -> Iterator[None]:
    """Collect at the end what garbage was made meanwhile; objects that were there before are passed over."""
    global _set_aside
    inside = _set_aside
    if inside or not gc.get_freeze_count():
        gc.freeze()
        _set_aside = True
    try:
        yield
    finally:
        gc.collect()
        if _set_aside and not inside:
            _set_aside = False
            gc.unfreeze()


@contextmanager
def newer_objects() -> Iterator[Callable[[], list[object]]]:
    """Set older objects aside, and tell which are newer; meanwhile the collector seldom goes through all.

    Returns:
        What lists the objects that were made since.
    """
    with older_objects_set_aside(), _full_collections_seldom():
        if _set_aside:
            gc.freeze()  # what was made since a call around this one did so, until that one ends
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
    """Most of what capturing makes is kept, and going through all of it finds little: it took a sixth of the
    time of models of many layers."""
    first, second, third = gc.get_threshold()
    gc.set_threshold(first, second, third * _SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)


@contextmanager
def nothing_set_aside() -> Iterator[None]:
    """Let the garbage collector see all objects; it tells who holds an object of those that it sees only."""
    if not gc.get_freeze_count():
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
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
