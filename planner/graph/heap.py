"""The garbage collector, while much is made that is kept."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ReferenceType


@contextmanager
def older_objects_set_aside() -> Iterator[Callable[[], list[object]]]:
    """Let the garbage collector pass over all objects that are there already.

    Tracing makes hundreds of thousands of objects, and with every so many the collector goes through all
    that the process has: libraries, the model, the user's data. Garbage that is made meanwhile is collected
    as ever. Where somebody has frozen objects on purpose (see :func:`gc.freeze`), nothing is set aside.

    Returns:
        What lists the objects that were made since.
    """
    if gc.get_freeze_count():
        # Held, so that no other object gets the id of one of them; but for weak references, whose owners
        # trust in their end.
        older = [o for o in gc.get_objects() if not issubclass(type(o), ReferenceType)]
        ids = {id(o) for o in older}
        yield lambda: [o for o in gc.get_objects() if id(o) not in ids and o is not older]
        older.clear()
        return
    gc.freeze()
    try:
        yield gc.get_objects
    finally:
        gc.unfreeze()
