"""The garbage collector, while much is made that is kept."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Let the garbage collector pass over all objects that are there already.

    Tracing makes hundreds of thousands of objects, and with every so many the collector goes through all
    that the process has: libraries, the model, the user's data. Garbage that is made meanwhile is collected
    as ever. Where somebody has frozen objects on purpose (see :func:`gc.freeze`), nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
